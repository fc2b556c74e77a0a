"""Changes of a score before slots are ranked. One file per idea; the file registers it, and its fields are its options.
A refinement gets the score [B, Hkv, C] (or [B, 1, C]), pooled where slots compete, and returns the numbers that are
ranked, of the same kind; or it gives the numbers that a head's slots are taken by once their count is known."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..inputs import Slots
from ..registry import Part, Registry, load_folder

REFINEMENTS: Registry = Registry("refinement")


@REFINEMENTS.add("none")
@dataclass(frozen=True)
class Refinement(Part):
    """The score as it is."""

    picks_by: ClassVar[tuple[Any, ...]] = ()  # quantities that `pick` gets, as a score's
    refines: ClassVar[bool] = False  # `refine` changes the numbers that are ranked
    picks: ClassVar[bool] = False  # `pick` changes the numbers that a head's slots are taken by

    def refine(self, slots: Slots, score: torch.Tensor) -> torch.Tensor:
        return score

    def pick(self, slots: Slots, score: torch.Tensor, keep: torch.Tensor, *quantities: Any) -> torch.Tensor:
        """Return the numbers that each head's slots are taken by, if keep [B, Hkv] of its slots stay: fp32 [B, Hkv, C].
        score: the ranked numbers that decided `keep`."""
        return score


load_folder(__name__)
