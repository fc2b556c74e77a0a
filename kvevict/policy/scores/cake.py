from dataclasses import dataclass
from typing import ClassVar

from ..checks import at_least_0
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
        at_least_0("gamma", self.gamma)

    def score(self, view):
        mean, variance = view.moments
        return (mean + self.gamma * variance).unflatten(1, (view.n.shape[1], -1)).mean(2)
