"""Changes of a score before slots are ranked. The fields of a refinement are its options.

A refinement gets the score [B, Hkv, C] (or [B, 1, C]), pooled where slots compete, and returns the numbers that are
ranked, of the same shape. Or it picks: once the number of slots per head is known, it gives the numbers by which a head
takes its slots."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..ops import _ops
from .heads import best, order
from .inputs import Slots
from .registry import Part, Registry

REFINEMENTS: Registry = Registry("refinement")
EPSILON = 1e-4  # CriticalKV's: a slot without a score counts by its value alone


@REFINEMENTS.add("none")
@dataclass(frozen=True)
class Refinement(Part):
    """The score as it is."""

    picks_by: ClassVar[tuple[str, ...]] = ()  # quantities that `pick` gets, as a score's `needs`
    refines: ClassVar[bool] = False  # `refine` changes the numbers that are ranked
    picks: ClassVar[bool] = False  # `pick` changes the numbers by which a head takes its slots

    def refine(self, slots: Slots, score: torch.Tensor) -> torch.Tensor:
        return score

    def pick(self, slots: Slots, score: torch.Tensor, keep: torch.Tensor, *quantities: Any) -> torch.Tensor:
        """Return the numbers by which each head takes keep [B, Hkv] slots: fp32 [B, Hkv, C]. score: the ranked numbers,
        which have decided `keep`."""
        return score


@REFINEMENTS.add("caote")
@dataclass(frozen=True)
class Caote(Refinement):
    """CAOTE (eq. 6): how far a head's attention output moves when a slot is removed, the score, summed over rows and
    pooled, taken as weights."""

    fast: ClassVar[bool] = False
    refines: ClassVar[bool] = True

    def refine(self, slots: Slots, score: torch.Tensor) -> torch.Tensor:
        kv, heads = slots.kv, slots.kv.stored.len.shape[1]
        weights = score if score.shape[1] == heads else score.expand(-1, heads, -1)
        return slots.heads.merge(_ops.refine(kv.stored, kv.v, kv.first, kv.end, weights.contiguous(), fast=self.fast))


@REFINEMENTS.add("fastcaote")
@dataclass(frozen=True)
class FastCaote(Caote):
    """FastCAOTE (eq. 8): CAOTE with the plain mean value in place of the weighted one."""

    fast: ClassVar[bool] = True


@REFINEMENTS.add("critical")
@dataclass(frozen=True)
class Critical(Refinement):
    """CriticalKV (Feng et al. 2025, algorithm 1): half of a head's slots by score, the others by (score + 1e-4) times
    the 1-norm of what W_O makes of the value, mean over the group. Protected slots count as the first half's best. How
    many slots each head keeps is decided by the scores alone."""

    picks: ClassVar[bool] = True
    picks_by: ClassVar[tuple[str, ...]] = ("output_norm",)

    def pick(self, slots: Slots, score: torch.Tensor, keep: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        wanted = (keep // 2 - slots.least).clamp_min(0)
        first = best(order(slots, score).flatten(0, 1), wanted.flatten()).view_as(score)
        return ((score + EPSILON) * norm).masked_fill(first, torch.inf)
