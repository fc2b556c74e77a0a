from dataclasses import dataclass
from typing import ClassVar

from ..checks import at_least_0
from . import SCORES, Pooled


@SCORES.add("cake")
@dataclass(frozen=True)
class Cake(Pooled):
    """CAKE (Qin et al. 2025): mean and `gamma` times variance of the observers' attention over rows, per query head,
    mean over the group; average pooling."""

    kernel: int = 5
    pool: str = "avg"
    gamma: float = 200.0
    needs: ClassVar[tuple] = ("moments",)

    def check(self, policy):
        super().check(policy)
        at_least_0("gamma", self.gamma)

    def score(self, slots, moments):
        mean, variance = moments
        return (mean + self.gamma * variance).unflatten(1, (slots.n.shape[1], -1)).mean(2)
