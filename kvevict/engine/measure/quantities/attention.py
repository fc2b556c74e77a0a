from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ....ops import _ops
from ....policy.inputs import CallRows, Observation, Observers, Slots
from ....policy.rows import Rows
from ....policy.rows.window import All
from . import QUANTITIES, Quantity, observed


@QUANTITIES.add("attention")
@dataclass(frozen=True)
class AttentionWeight(Quantity):
    """The attention weights a of the observing rows on each slot, reduced over rows and then over the query heads of a
    GQA group: [B, Hkv, C].

    reduce   the reduction over rows: "sum", "mean" or "max"
    group    the reduction over the query heads of a kv head: "mean", "sum" or "max"; "none": no reduction, [B, H, C]
    term     what is reduced: the weight "a", its "square", or its "entropy" -a ln a
    """

    reduce: str = "sum"
    group: str = "mean"
    term: str = "a"

    def attend(
        self, rows: Rows, step: CallRows, op: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        if not isinstance(rows, All) or step.appended:
            return None
        end = step.columns + 0 * step.first
        options = dict(reduce=self.reduce, group=self.group, term=self.term)
        return op(row_first=step.first, stop=end, observers=step.columns, **options)

    def measure(self, slots: Slots, observation: Observation) -> torch.Tensor:
        parts, reduce, group = observation.parts, self.reduce, self.group
        if len(parts) == 1:
            if parts[0].probs is not None and self.group == "mean" and self.term == "a":
                return parts[0].probs
            return self._of(slots, parts[0], reduce, group)
        if reduce == "max":  # the maximum over the rows of all parts comes before the reduction over heads
            each = [self._of(slots, part, "max", "max" if group == "max" else "none") for part in parts]
            return slots.heads.reduce(torch.stack(each).amax(0), "none" if group == "max" else group)
        # A maximum over heads comes after the sum over the rows of all parts.
        inner = group if group != "max" else "none"
        total: Any = sum(self._of(slots, part, "sum", inner) for part in parts)
        total = total / observation.row_count[:, None, None] if reduce == "mean" else total
        return total if inner == group else slots.heads.reduce(total, group)

    def _of(self, slots: Slots, part: Observers, reduce: str, group: str) -> torch.Tensor:
        return observed(_ops.score, slots, part, reduce=reduce, group=group, term=self.term, columns=slots.columns)


@QUANTITIES.add("moments")
@dataclass(frozen=True)
class Moments(Quantity):
    """(mean, sample variance) of each slot's attention weights over the observing rows: [B, H, C] each. With a single
    row the variance is 0."""

    def measure(self, slots: Slots, observation: Observation) -> tuple[torch.Tensor, torch.Tensor]:
        rows = observation.row_count.float()[:, None, None]
        mean, square = (AttentionWeight("mean", "none", term).measure(slots, observation) for term in ("a", "square"))
        variance = (square - mean**2).clamp_min(0) * rows / (rows - 1)
        return mean, variance.masked_fill(rows <= 1, 0)
