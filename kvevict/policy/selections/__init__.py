"""The slots that are kept. One file per idea; the file registers it, and its fields are its options.

A selection may change the numbers that rank slots (runs of slots instead of slots) before heads get their counts of
slots, and those counts after it. The best are then taken per head; ties go to the earlier slot.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..inputs import LayerRows, Slots
from ..registry import Part, Registry, load_folder

SELECTIONS: Registry = Registry("selection")


@SELECTIONS.add("token")
@dataclass(frozen=True)
class Selection(Part):
    """The best slots per kv head."""

    shared: ClassVar[bool] = False  # one choice for all heads of a layer
    run: ClassVar[int] = 1  # tokens that stay together
    spares: ClassVar[bool] = False  # `trim_to_runs` leaves some of the budget unused

    def unfinished(self, call: LayerRows) -> Any:
        """Count the last slots that are kept because their run is not complete yet, by a
        `kvevict.policy.seen.rows.LayerRows`: a number or [B]."""
        return 0

    def rank(self, slots: Slots, score: torch.Tensor) -> torch.Tensor:
        """Return the numbers that rank slots, from the slots' scores: fp32 [B, Hkv, C]."""
        return score

    def trim_to_runs(self, slots: Slots, score: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        """Count the slots per head, at most `keep`, that are really used: [B, Hkv]."""
        return keep


load_folder(__name__)
