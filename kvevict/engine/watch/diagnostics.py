"""Cost of an eviction for the rows that observe it: how far their attention outputs move, how much attention is lost.

The first part is maths on tensors of one kv head: q [G, R, D] the queries of its group, k and v [n, D] its slots, sees
[R, n] True for slots visible to a row, kept [n] True for slots that stay. Attention is rows x slots, and at most `ROWS`
rows observe.
The second part watches every eviction of a read, for `diagnose=True`.
"""

from typing import Any

import numpy as np
import torch

from ...ops import _ops
from ..cut import Choice
from ..read.layer import LayerCall
from .watcher import Watcher

ROWS = 64
NAMES = ("evictions", "joint_error", "output_error", "recall")


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sees: torch.Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention a [G, R, n] over the slots seen, in fp32, and outputs o [G, R, D]; sinks [G] take a share of
    it. A row that sees nothing gets 0."""
    x = _ops.softcapped(q.float() @ k.float().T * scale, softcap)
    x = x.masked_fill(~sees, -torch.inf)
    if sinks is not None:
        x = torch.cat([x, sinks[:, None, None].expand(*x.shape[:2], 1)], 2)
    a = x.softmax(2)[..., : k.shape[0]].masked_fill(~sees, 0)
    return a, a @ v.float()


def joint_error(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """CAOTE eq. 24 of a set of slots, the root of the heads' summed squares: outputs [H, R, D] with and without the set
    -> [R].

    Eq. 24, || sum_S a_i (o - v_i) || / (1 - sum_S a_i), equals || o - o' || with o' the attention renormalised over the
    slots that stay (theorem A.2 for a set). This form does not cancel when the set has nearly all of the attention. If
    a row loses all slots that it sees, o' is 0.
    """
    return (before - after).square().sum((0, 2)).sqrt()


def output_error(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """`joint_error` relative to the length of all heads' outputs: [R]."""
    return joint_error(before, after) / before.square().sum((0, 2)).sqrt().clamp_min(torch.finfo(before.dtype).tiny)


def by_group(q: torch.Tensor, kv_heads: int, sinks: Any, **options: Any) -> list[tuple[torch.Tensor, dict[str, Any]]]:
    """Per kv head the queries [G, R, D] of its group, out of q [H, R, D], and the options that `attention` takes."""
    sinks = [None] * kv_heads if sinks is None else sinks.unflatten(0, (kv_heads, -1))
    return [(queries, options | {"sinks": sink}) for queries, sink in zip(q.unflatten(0, (kv_heads, -1)), sinks)]


class Diagnostics(Watcher):
    """Watches the cuts of a read."""

    rows = ROWS  # at most so many rows of a call observe here

    def __init__(self) -> None:
        self.sums: dict = {}  # layer -> fp64 [4, B] of `NAMES`

    @torch.no_grad()
    def cut(self, call: LayerCall, choice: Choice) -> None:
        """Add a layer's losses by a `kvevict.engine.cut.Choice`."""
        slots, step = call.slots, call.step
        losing = np.flatnonzero(choice.all_ranks.sum(1) < slots.alive).tolist()
        with step.meter.clock("diagnose"):
            exact: dict = dict(dtype=torch.double, device="cpu")
            sums = self.sums.setdefault(slots.index, torch.zeros(len(NAMES), len(choice.keep), **exact))
            observing, q = step.rows.observing(step).clip(0, ROWS).tolist(), call.watched(ROWS)
            for b in losing:
                if not observing[b]:  # its rows were those of an earlier call
                    sums[:, b] += torch.tensor([1, *[torch.nan] * 3], **exact)
                    continue
                queries = by_group(q[b, :, -observing[b] :], slots.kv.k.shape[1], **slots.kv.options)
                index = [choice.index[b, h, :n] for h, n in enumerate(choice.keep[b])]
                index *= slots.kv.k.shape[1] // len(index)
                heads = [_head(call, b, h, *one) for h, one in enumerate(zip(index, *zip(*queries, strict=True)))]
                before, after, mass, kept = (slots.heads.gather(torch.cat(part)[None])[0] for part in zip(*heads))
                errors = joint_error(before, after).mean(), output_error(before, after).mean(), kept.sum() / mass.sum()
                sums[:, b] += torch.tensor([1, *errors], **exact)

    def report(self, rows: int, own: list[bool]) -> dict[str, Any]:
        """`NAMES` -> [layer][row]: how many evictions, and means over them; None for a layer that is not ours."""
        nothing = [0, 0.0, 0.0, 1.0]

        def of(index: int, i: int) -> list:
            counts, *totals = self.sums.get(index, torch.zeros(len(NAMES), rows)).tolist()
            if i == 0:
                return [int(count) for count in counts]
            return [total / count if count else nothing[i] for total, count in zip(totals[i - 1], counts)]

        return dict(diagnostics={
            name: [of(index, i) if ours else None for index, ours in enumerate(own)] for i, name in enumerate(NAMES)
        })  # fmt: skip


def _head(call: LayerCall, b: int, h: int, index: torch.Tensor, q: torch.Tensor, options: dict) -> tuple:
    """Outputs [G, R, D] with and without a kv head's lost slots, and attention [G, R] in all and on its kept slots.

    The rows are the call's last, so a new slot is seen by rows at or after its column, a stored one by all. A
    question's copies do not see the question before the text.
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
