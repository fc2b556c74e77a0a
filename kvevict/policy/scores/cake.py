from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..inputs import Slots
from . import SCORES, Pooled

GAMMA = 200.0  # the paper's weight of the variance


@SCORES.add("cake")
@dataclass(frozen=True)
class Cake(Pooled):
    """CAKE (Qin et al. 2025): mean and 200 times variance of the observers' attention over rows, per query head,
    mean over the group; average pooling."""

    kernel: int = 5
    pool: str = "avg"
    needs: ClassVar[tuple[Any, ...]] = ("moments",)

    def score(self, slots: Slots, moments: tuple[torch.Tensor, ...]) -> torch.Tensor:
        mean, variance = moments
        return (mean + GAMMA * variance).unflatten(1, (slots.n.shape[1], -1)).mean(2)
