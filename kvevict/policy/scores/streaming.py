from dataclasses import dataclass
from typing import ClassVar

import torch

from ..inputs import Slots
from . import SCORES, Score


@SCORES.add("streaming")
@dataclass(frozen=True)
class Streaming(Score):
    """StreamingLLM (Xiao et al. 2023): the first `sink` slots, then the most recent ones."""

    sink: int = 4
    continues: ClassVar[bool] = True
    decodes: ClassVar[bool] = True
    ordinal: ClassVar[bool] = True

    def score(self, slots: Slots) -> torch.Tensor:
        return torch.arange(slots.columns, dtype=torch.float32, device=slots.device).expand(*slots.n.shape, -1)
