"""Measures the cost of an eviction for the rows that observe it: how far their attention outputs move, and how much of
their attention goes to slots that stay. `Diagnostics` does so at every eviction of a read, for `diagnose=True`.

Shapes for one kv head: q [G, R, D] the queries of its group, k and v [n, D] its slots, sees [R, n] True where a row
sees a slot, kept [n] True for slots that stay. Attention matrices [G, R, n] are materialised, for R <= `ROWS` rows.
"""

import numpy as np
import torch
from torch import Tensor

from ...ops import _ops
from ..cut import Choice
from ..read.layer import LayerCall
from .watcher import Watcher

ROWS = 64
LEAST = 1e-6  # smallest 1 - a by which an error of a removal is divided (METHODS section 1)
NAMES = ("evictions", "joint_error", "output_error", "recall")


def attention(
    q: Tensor, k: Tensor, v: Tensor, sees: Tensor, *, scale: float, softcap: float = 0.0, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(Attention weights [G, R, n], attention outputs [G, R, D]) of one kv head, in fp32. The softmax spans the slots
    that a row sees and, if given, the group's attention sinks [G]; a row that sees nothing gets 0."""
    x = _ops.softcapped(q.float() @ k.float().T * scale, softcap)
    x = x.masked_fill(~sees, -torch.inf)
    if sinks is not None:
        x = torch.cat([x, sinks[:, None, None].expand(*x.shape[:2], 1)], 2)
    a = x.softmax(2)[..., : k.shape[0]].masked_fill(~sees, 0)
    return a, a @ v.float()


def joint_error(before: Tensor, after: Tensor) -> Tensor:
    """The change of the attention output by an eviction: || o - o' || over all heads, [R], from the outputs o
    [H, R, D] `before` and o' `after`; o' is 0 if a row loses all slots that it sees.

    By CAOTE's theorem A.2 this is eq. 24, || sum_S a_i (o - v_i) || / (1 - sum_S a_i) for the evicted slots S with
    attention weights a_i and values v_i, which would lose its digits when S has nearly all attention."""
    return (before - after).square().sum((0, 2)).sqrt()


def output_error(before: Tensor, after: Tensor) -> Tensor:
    """`joint_error` divided by || o ||, the norm of all heads' outputs before the eviction: [R]."""
    return joint_error(before, after) / before.square().sum((0, 2)).sqrt().clamp_min(torch.finfo(before.dtype).tiny)


def by_group(q: Tensor, kv_heads: int, sinks: Tensor | None, **options: float) -> list[tuple[Tensor, dict]]:
    """Split q [H, R, D] and sinks [H] by kv head. Returns, for each head, the queries [G, R, D] of its group and its
    keyword arguments for `attention`."""
    own = [None] * kv_heads if sinks is None else sinks.unflatten(0, (kv_heads, -1))
    return [(queries, options | {"sinks": sink}) for queries, sink in zip(q.unflatten(0, (kv_heads, -1)), own)]


class Diagnostics(Watcher):
    """A watcher that measures the cost of every eviction of a read."""

    rows = ROWS

    def __init__(self) -> None:
        self.sums: dict[int, Tensor] = {}  # layer -> fp64 [4, B]: each of `NAMES`, summed over the layer's evictions

    @torch.no_grad()
    def cut(self, call: LayerCall, choice: Choice) -> None:
        slots, step = call.slots, call.step
        losing = np.flatnonzero(choice.all_ranks.sum(1) < slots.alive).tolist()
        with step.meter.clock("diagnose"):
            exact: dict = dict(dtype=torch.double, device="cpu")
            sums = self.sums.setdefault(slots.index, torch.zeros(len(NAMES), len(choice.keep), **exact))
            observing, q = step.rows.observing(step).clip(0, ROWS).tolist(), call.watched(ROWS)
            for b in losing:
                if not observing[b]:  # the observing rows belong to an earlier call and cannot be measured here: NaN
                    sums[:, b] += torch.tensor([1, *[torch.nan] * 3], **exact)
                    continue
                queries = by_group(q[b, :, -observing[b] :], slots.kv.k.shape[1], **slots.kv.options)
                index = [choice.index[b, h, :n] for h, n in enumerate(choice.keep[b])]
                index *= slots.kv.k.shape[1] // len(index)
                heads = [_head(call, b, h, *one) for h, one in enumerate(zip(index, *zip(*queries, strict=True)))]
                before, after, mass, kept = (slots.heads.gather(torch.cat(part)[None])[0] for part in zip(*heads))
                errors = joint_error(before, after).mean(), output_error(before, after).mean(), kept.sum() / mass.sum()
                sums[:, b] += torch.tensor([1, *errors], **exact)

    def report(self, rows: int, own: list[bool]) -> dict:
        """The entry "diagnostics": for each of `NAMES` a list [layer][batch row] of the number of evictions, or of the
        mean over them; None in place of a layer that does not evict. own: for each layer, whether it evicts."""
        found: dict[str, list] = {name: [] for name in NAMES}
        for index, ours in enumerate(own):
            counts, *totals = self.sums.get(index, torch.zeros(len(NAMES), rows)).tolist()
            means = [
                [total / count if count else nothing for total, count in zip(each, counts)]
                for each, nothing in zip(totals, (0.0, 0.0, 1.0), strict=True)
            ]
            for name, values in zip(NAMES, ([int(count) for count in counts], *means), strict=True):
                found[name].append(values if ours else None)
        return dict(diagnostics=found)


def _head(call: LayerCall, b: int, h: int, index: Tensor, q: Tensor, options: dict) -> tuple[Tensor, ...]:
    """Measure kv head h of batch row b, with the queries q [G, R, D] of its group. Returns its attention outputs
    [G, R, D] before and after the eviction, and the sums of attention weights [G, R] on all slots and on the slots
    index [n] that it keeps, both before the eviction.

    The queries are the call's last R rows: each sees all stored slots, and new slots up to its own column. Appended
    copies of a question that stands before the text do not see the question itself (`Step.unseen`).
    """
    kv, slots = call.slots.kv, call.slots.kv.stored
    stored, first = int(slots.counts[b, h]), int(call.slots.padding[b])
    old = slice(int(slots.offset[b, h]), int(slots.offset[b, h]) + stored)
    k, v = (torch.cat([slots.numbers(x, b, h, old), getattr(kv, x)[b, h, first:]]) for x in "kv")
    columns = call.step.positions.shape[1]
    column = torch.arange(len(k), device=k.device) - stored + first
    sees = column <= torch.arange(columns - q.shape[1], columns, device=k.device)[:, None]
    if call.step.unseen is not None and call.step.appended:
        sees = sees & ~call.slots.of_head(call.slots.at(call.step.unseen), b, h)
    kept = torch.zeros(len(k), dtype=torch.bool, device=k.device)
    kept[index.long()] = True
    a, before = attention(q, k, v, sees, **options)
    _, after = attention(q, k, v, sees & kept, **options)
    return before, after, a.sum(2), (a * kept).sum(2)
