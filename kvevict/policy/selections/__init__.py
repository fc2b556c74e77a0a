"""Which slots are kept. One file per idea; the file registers it, and its fields are its options.

A selection may change what slots are ranked by (runs of slots instead of slots) before heads get their numbers, and
those numbers after it; the best are then taken per head, ties going to the earlier slot.
"""

import sys
from dataclasses import dataclass
from typing import ClassVar

from ..registry import Registry, load_folder

SELECTIONS = Registry("selection")


@dataclass(frozen=True)
class Selection:
    shared: ClassVar[bool] = False  # one choice for all heads of a layer
    run: ClassVar[int] = 1  # tokens that stay together
    spares: ClassVar[bool] = False  # `whole` leaves some of the budget unused

    def check(self, policy) -> None:
        """Raise ValueError when the options do not fit each other or the policy."""

    def tail(self, view):
        """How many of the last slots are kept because their run is not whole yet: a number or [B]."""
        return 0

    def rank(self, view, score):
        """What slots are ranked by, from their scores: fp32 [B, Hkv, C]."""
        return score

    def whole(self, view, score, keep):
        """Slots per head [B, Hkv], at most `keep`, that are really used."""
        return keep


load_folder(sys.modules[__name__])
