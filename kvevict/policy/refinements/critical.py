from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..heads import best, order
from ..inputs import Slots
from . import REFINEMENTS, Refinement

EPSILON = 1e-4  # a slot without a score is worth something, by its value


@REFINEMENTS.add("critical")
@dataclass(frozen=True)
class Critical(Refinement):
    """CriticalKV (Feng et al. 2025, algorithm 1): half of a head's slots by score, the others by (score + 1e-4) times
    the 1-norm of what W_O makes of the value, mean over the group. Protected slots count as the first half's best. How
    many slots each head keeps is decided by the scores alone."""

    picks: ClassVar[bool] = True
    picks_by: ClassVar[tuple[Any, ...]] = ("output_norm",)

    def pick(self, slots: Slots, score: torch.Tensor, keep: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        wanted = (keep // 2 - slots.least).clamp_min(0)
        first = best(order(slots, score).flatten(0, 1), wanted.flatten()).view_as(score)
        return ((score + EPSILON) * norm).masked_fill(first, torch.inf)
