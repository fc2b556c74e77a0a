from dataclasses import dataclass

import torch

from . import HEADS, HeadBudget, order, winners


@HEADS.add("flat")
@dataclass(frozen=True)
class Flat(HeadBudget):
    """EDIE: the protected slots of every head, then the best of the rest over all heads; no floor."""

    def keep(self, view, score, slots):
        return (view.least + winners(order(view, score), slots - view.least.sum(1))).to(torch.int32)
