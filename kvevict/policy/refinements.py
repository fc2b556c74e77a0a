"""Refinements change the scores by which slots are ranked. The fields of a refinement are its options.

`refine` gets the scores [B, Hkv, C] (or [B, 1, C]), pooled except for protected slots, and returns the numbers that
slots are ranked by. `pick` comes later, when the number of slots that each head keeps is known, and returns the numbers
by which each head chooses its slots. A refinement has one of them or none."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..ops import _ops
from .checks import flag
from .heads import best, order
from .inputs import OwnPolicy, Slots
from .registry import Part, Registry

REFINEMENTS: Registry = Registry("refinement")
EPSILON = 1e-4  # CriticalKV's: added to scores, so that slots of score 0 are ranked by their values


@REFINEMENTS.add("none")
@dataclass(frozen=True)
class Refinement(Part):
    """Scores are not changed."""

    picks_by: ClassVar[tuple[str, ...]] = ()  # names of the quantities that `pick` gets
    refines: ClassVar[bool] = False  # `refine` changes the numbers that are ranked
    picks: ClassVar[bool] = False  # `pick` changes the numbers by which a head chooses its slots

    def refine(self, slots: Slots, score: torch.Tensor) -> torch.Tensor:
        return score

    def pick(self, slots: Slots, score: torch.Tensor, keep: torch.Tensor, *quantities: Any) -> torch.Tensor:
        """Return the numbers by which each head chooses its keep [B, Hkv] slots: fp32 [B, Hkv, C]. score: the numbers
        by which the head budget ranked slots to decide `keep`."""
        return score


@REFINEMENTS.add("caote")
@dataclass(frozen=True)
class Caote(Refinement):
    """CAOTE (Goel et al. 2025, eq. 6): how far a head's attention output moves when a slot is removed. The attention
    weights are the scores, summed over rows, pooled and divided by their sum.

    squared   True: the distance of the value from the mean value is squared, as in eq. 7
    """

    squared: bool = False
    fast: ClassVar[bool] = False
    refines: ClassVar[bool] = True

    def check(self, policy: OwnPolicy) -> None:
        flag("squared", self.squared)

    def refine(self, slots: Slots, score: torch.Tensor) -> torch.Tensor:
        kv, heads = slots.kv, slots.kv.stored.len.shape[1]
        weights = (score if score.shape[1] == heads else score.expand(-1, heads, -1)).contiguous()
        how = dict(fast=self.fast, squared=self.squared)
        return slots.heads.merge(_ops.refine(kv.stored, kv.v, kv.first, kv.end, weights, **how))


@REFINEMENTS.add("fastcaote")
@dataclass(frozen=True)
class FastCaote(Caote):
    """FastCAOTE (eq. 8): CAOTE with the unweighted mean of the values in place of the weighted mean."""

    fast: ClassVar[bool] = True


@REFINEMENTS.add("critical")
@dataclass(frozen=True)
class Critical(Refinement):
    """CriticalKV (Feng et al. 2025, algorithm 1): a head chooses half of its slots by score, and the others by (score +
    1e-4) * ||W_O v||_1, the mean over the query heads of a group; W_O v is the value after the output projection.
    Protected slots belong to the first half. The number of slots that each head keeps depends on scores alone."""

    picks: ClassVar[bool] = True
    picks_by: ClassVar[tuple[str, ...]] = ("output_norm",)

    def pick(self, slots: Slots, score: torch.Tensor, keep: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        wanted = (keep // 2 - slots.least).clamp_min(0)
        first = best(order(slots, score).flatten(0, 1), wanted.flatten()).view_as(score)
        return ((score + EPSILON) * norm).masked_fill(first, torch.inf)
