from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ....ops import _ops
from ....policy.inputs import Observation, Observers, Slots
from . import QUANTITIES, Quantity, observed


@QUANTITIES.add("output_error")
@dataclass(frozen=True)
class OutputError(Quantity):
    """How far the observing rows' attention outputs move when one slot is removed, per slot and summed over rows, as
    `kvevict.ops._ops.error` computes it.

    kind     formula of the error: "edie" (EDIE eq. 9-11), "l1" (EDIE eq. 7) or "l2" (CAOTE eq. 6)
    alpha    keeps the denominator 1 + alpha - a of "edie" from vanishing
    weight   weight c_j of row j (EDIE eq. 10, table 3): 1 ("none"), or the row's largest attention weight on the slots
             at all positions i ("all"), w <= i < T - 2w ("middle"), i < T - 2w ("i<=t-2w") or w <= i ("i>w"), with w
             the number of observing rows and T the number of tokens seen
    group    reduction over the query heads of a kv head: "sum", "mean", "max" or "none"
    """

    kind: str
    alpha: float = 0.0
    weight: str = "none"
    group: str = "sum"
    outputs: ClassVar[bool] = True

    def measure(self, slots: Slots, observation: Observation) -> torch.Tensor:
        weights, start = self.row_weights(slots, observation), 0
        total: Any = None
        for part in observation.parts:
            rows, out = part.q.shape[2], part.out
            assert out is not None  # because `outputs` is True
            own = None if weights is None else weights[:, :, start : start + rows].contiguous()
            options = dict(kind=self.kind, alpha=self.alpha, weight=own, columns=slots.columns)
            each = observed(_ops.error, slots, part, (out,), self.group, **options)
            total, start = each if total is None else total + each, start + rows
        return total

    def row_weights(self, slots: Slots, observation: Observation) -> torch.Tensor | None:
        """The weights c_j [B, H, R] of the rows; None: all are 1. For a head without a slot in the range of `weight`,
        the maximum is taken over the slots before the observing rows' own slots; if there are none, c_j is 1."""
        if self.weight == "none":
            return None
        rows, n = observation.row_count[:, None], slots.n
        end = slots.positions.amax(-1).amax(-1, keepdim=True) + 1  # T, the number of tokens seen
        first, last, outside = slots.below(torch.cat([rows, end - 2 * rows, end - rows], 1)).unbind()
        zero = torch.zeros_like(n)
        lo = first if self.weight in ("middle", "i>w") else zero
        hi = last if self.weight in ("middle", "i<=t-2w") else n
        found = []
        for part in observation.parts:
            empty = _unseen(slots, part, lo, hi)
            start, stop = torch.where(empty, zero, lo), torch.where(empty, outside, hi)
            largest, none = peak(slots, part, start, stop), _unseen(slots, part, start, stop)
            none = none.repeat_interleave(largest.shape[1] // n.shape[1], 1)
            found.append(largest.masked_fill(none[..., None], 1.0))
        return torch.cat(found, 2)


def _unseen(slots: Slots, part: Observers, lo: torch.Tensor, hi: torch.Tensor) -> torch.Tensor:
    """Whether the observing rows see no slot lo <= i < hi of a head, because lo >= hi or because these slots are hidden
    from them: bool [B, Hkv]. lo, hi: [B, Hkv]."""
    if part.unseen is None:
        return hi <= lo
    start, stop = slots.around(part.unseen)
    return (torch.minimum(hi, start) <= lo) & (hi <= torch.maximum(lo, stop))


def peak(slots: Slots, part: Observers, lo: torch.Tensor, hi: torch.Tensor) -> torch.Tensor:
    """The largest attention weight of each observing row on the slots lo <= i < hi of a head: [B, H, R]. lo, hi: [B,
    Hkv]."""
    heads = slots.kv.stored.len.shape[1]

    def largest(*ends: torch.Tensor) -> torch.Tensor:
        ends = tuple((x if x.shape[1] == heads else x.expand(-1, heads)).int().contiguous() for x in ends)
        return observed(_ops.peak, slots, part, (torch.minimum(*ends), ends[1]))

    hi = torch.minimum(
        hi, slots.n - (slots.kv.k.shape[2] - part.stop.to(torch.int32))[:, None]
    )  # new columns from `part.stop` on are not seen
    if part.unseen is None:
        return largest(lo, hi)
    start, stop = slots.around(part.unseen)
    return torch.maximum(largest(lo, torch.minimum(hi, start)), largest(torch.maximum(lo, stop), hi))
