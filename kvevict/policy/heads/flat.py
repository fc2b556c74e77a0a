from dataclasses import dataclass

import torch

from ..inputs import Slots
from . import HEADS, HeadBudget, order, winners


@HEADS.add("flat")
@dataclass(frozen=True)
class Flat(HeadBudget):
    """EDIE: the protected slots of every head, then the best of the rest over all heads; no floor."""

    def keep(self, slots: Slots, score: torch.Tensor, wanted: torch.Tensor, run: int = 1) -> torch.Tensor:
        return (slots.least + winners(order(slots, score, run), wanted - slots.least.sum(1))).to(torch.int32)
