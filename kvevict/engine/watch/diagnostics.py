"""What an eviction costs the rows that observe it: how far their attention outputs move, how much attention is lost.

The functions are for one kv head: q [G, R, D] the queries of its group, k and v [n, D] its slots, sees [R, n] True for
slots visible to a row, kept [n] True for slots that stay. They compute rows x slots, of at most `ROWS` rows.
`Diagnostics` watches every eviction of a read, for `diagnose=True`.
"""

import numpy as np
import torch
from torch import Tensor

from ...ops import _ops
from ..cut import Choice
from ..read.layer import LayerCall
from .watcher import Watcher

ROWS = 64
NAMES = ("evictions", "joint_error", "output_error", "recall")


def attention(
    q: Tensor, k: Tensor, v: Tensor, sees: Tensor, *, scale: float, softcap: float = 0.0, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Softmax attention a [G, R, n] over the slots seen, in fp32, and outputs o [G, R, D]; sinks [G] take a share of
    it. A row that sees nothing gets 0."""
    x = _ops.softcapped(q.float() @ k.float().T * scale, softcap)
    x = x.masked_fill(~sees, -torch.inf)
    if sinks is not None:
        x = torch.cat([x, sinks[:, None, None].expand(*x.shape[:2], 1)], 2)
    a = x.softmax(2)[..., : k.shape[0]].masked_fill(~sees, 0)
    return a, a @ v.float()


def joint_error(before: Tensor, after: Tensor) -> Tensor:
    """CAOTE eq. 24 of evicted slots S, || sum_S a_i (o - v_i) || / (1 - sum_S a_i), as || o - o' || (theorem A.2): from
    outputs [H, R, D] before and after the eviction, the norm over all heads, [R]. Eq. 24 itself would cancel if S had
    nearly all attention. If a row loses all slots that it sees, o' is 0."""
    return (before - after).square().sum((0, 2)).sqrt()


def output_error(before: Tensor, after: Tensor) -> Tensor:
    """`joint_error` relative to the length of all heads' outputs: [R]."""
    return joint_error(before, after) / before.square().sum((0, 2)).sqrt().clamp_min(torch.finfo(before.dtype).tiny)


def by_group(q: Tensor, kv_heads: int, sinks: Tensor | None, **options: float) -> list[tuple[Tensor, dict]]:
    """Split q [H, R, D] by kv head: (queries [G, R, D] of its group, the options of `attention`) of each."""
    own = [None] * kv_heads if sinks is None else sinks.unflatten(0, (kv_heads, -1))
    return [(queries, options | {"sinks": sink}) for queries, sink in zip(q.unflatten(0, (kv_heads, -1)), own)]


class Diagnostics(Watcher):
    """Measures every cut of a read."""

    rows = ROWS

    def __init__(self) -> None:
        self.sums: dict[int, Tensor] = {}  # layer -> fp64 [4, B], sums of `NAMES` over its cuts

    @torch.no_grad()
    def cut(self, call: LayerCall, choice: Choice) -> None:
        slots, step = call.slots, call.step
        losing = np.flatnonzero(choice.all_ranks.sum(1) < slots.alive).tolist()
        with step.meter.clock("diagnose"):
            exact: dict = dict(dtype=torch.double, device="cpu")
            sums = self.sums.setdefault(slots.index, torch.zeros(len(NAMES), len(choice.keep), **exact))
            observing, q = step.rows.observing(step).clip(0, ROWS).tolist(), call.watched(ROWS)
            for b in losing:
                if not observing[b]:  # the rows that observe were those of an earlier call
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
        """`NAMES` -> [layer][row]: the number of evictions, and means over them; None: the layer does not evict."""
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
    """Outputs [G, R, D] of a kv head with and without the slots that it loses, and attention [G, R] in all and on the
    slots index [n] that it keeps.

    The rows are the call's last, so a new slot is visible to rows at or after its column, a stored slot to all. Copies
    of a question do not see that question before the text.
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
