from dataclasses import dataclass

import torch

from . import HEADS, HeadBudget, order, winners


@HEADS.add("flat")
@dataclass(frozen=True)
class Flat(HeadBudget):
    """EDIE: the protected slots of every head, then the best of the rest over all heads; no floor."""

    def keep(self, slots, score, wanted, run=1):
        return (slots.least + winners(order(slots, score, run), wanted - slots.least.sum(1))).to(torch.int32)
