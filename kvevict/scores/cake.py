from dataclasses import dataclass
from typing import ClassVar

import torch

from . import SCORES
from .snapkv import SnapKV


@SCORES.add("cake")
@dataclass(frozen=True)
class Cake(SnapKV):
    """CAKE (Qin et al. 2025): mean and `gamma` times variance of the window's attention over its rows, per query head,
    mean over the group; average pooling."""

    gamma: float = 200.0
    kernel: int = 5
    pool: str = "avg"
    reduce: ClassVar[str] = "mean"
    passes: ClassVar[int] = 2

    def check(self, policy):
        super().check(policy)
        if isinstance(self.gamma, bool) or not isinstance(self.gamma, (int, float)) or not self.gamma >= 0:
            raise ValueError(f"gamma must be a number >= 0, got {self.gamma!r}")

    def score(self, view):
        q, skip, *_ = view.observers(self.window)
        rows = (q.shape[2] - skip).float()[:, None, None]
        mean, square = (view.attention(self.window, "mean", term=x, group="none") for x in ("a", "square"))
        variance = (square - mean**2).clamp_min(0) * rows / (rows - 1)  # of a sample, as in the source
        variance = torch.where(rows > 1, variance, 0)
        return (mean + self.gamma * variance).unflatten(1, (view.n.shape[1], -1)).mean(2)
