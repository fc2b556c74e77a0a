from dataclasses import dataclass
from typing import ClassVar

import torch

from ..inputs import Slots
from . import REFINEMENTS, Refinement


@REFINEMENTS.add("caote")
@dataclass(frozen=True)
class Caote(Refinement):
    """CAOTE (eq. 6): how far a head's attention output moves when a slot is removed, the score, summed over rows and
    pooled, taken as weights."""

    fast: ClassVar[bool] = False
    refines: ClassVar[bool] = True

    def refine(self, slots: Slots, score: torch.Tensor) -> torch.Tensor:
        return slots.removal_error(score, self.fast)


@REFINEMENTS.add("fastcaote")
@dataclass(frozen=True)
class FastCaote(Caote):
    """FastCAOTE (eq. 8): CAOTE with the plain mean value in place of the weighted one."""

    fast: ClassVar[bool] = True
