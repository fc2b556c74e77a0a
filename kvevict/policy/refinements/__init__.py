"""What a score becomes before slots are ranked. One file per idea; the file registers it, and its fields are its
options. A refinement gets the score [B, Hkv, C] (or [B, 1, C]), pooled where slots compete, and returns what is ranked,
of the same kind."""

import sys
from dataclasses import dataclass
from typing import ClassVar

from ..registry import Registry, load_folder

REFINEMENTS = Registry("refinement")


@REFINEMENTS.add("none")
@dataclass(frozen=True)
class Refinement:
    """The score as it is."""

    needs: ClassVar[tuple] = ()  # quantities that `refine` gets, as a score's
    refines: ClassVar[bool] = False
    protect: ClassVar[bool] = True  # the score's protected slots stay protected

    def check(self, policy) -> None:
        """Raise ValueError when the options do not fit each other or the policy."""

    def scans(self) -> int:
        """How often every slot's value is read."""
        return 0

    def flops(self) -> int:
        """FLOPs per component of a slot's value."""
        return 0

    def refine(self, slots, score, *quantities):
        return score


load_folder(sys.modules[__name__])
