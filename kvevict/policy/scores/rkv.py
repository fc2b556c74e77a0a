from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..inputs import Slots
from ..rows.window import Window
from . import SCORES, Pooled

MIX = 0.1  # the paper's lambda, the weight of the importance


@SCORES.add("rkv")
@dataclass(frozen=True)
class RKV(Pooled):
    """R-KV (2505.24133): attention of the last 8 rows less what other keys repeat of a slot's, for long answers.

    The score is 0.1 times the importance less 0.9 times the redundancy. The importance alone is pooled.
    """

    rows: ClassVar = Window(8)
    continues: ClassVar[bool] = True
    ordinal: ClassVar[bool] = True
    own_interval: ClassVar[int] = 128
    needs: ClassVar[tuple[Any, ...]] = ("group_attention", "redundancy")

    def score(self, slots: Slots, importance: torch.Tensor, redundancy: torch.Tensor) -> torch.Tensor:
        pooled = super().pooled(slots, importance).masked_fill(~slots.competing, 0)
        return MIX * pooled - (1 - MIX) * redundancy

    def pooled(self, slots: Slots, score: torch.Tensor) -> torch.Tensor:
        return score
