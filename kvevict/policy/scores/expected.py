from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..checks import at_least_0, hold_text
from ..inputs import Policy, Slots, need
from . import SCORES, Score


@SCORES.add("expected")
@dataclass(frozen=True)
class Expected(Score):
    """Expected Attention (Devoto et al. 2025): the expected attention of queries like those so far, times ||v_i||_2.

    eps     is added to the attention, so that a slot that nothing will attend to is worth its value's norm
    sink    first slots that are always kept; they, and the queries at these positions, take no part
    stats   file with the mean and the covariance of the model's queries, from `kvevict statistics`; None: those of the
            text read so far
    """

    eps: float = 0.01
    sink: int = 4
    stats: object = None
    comparable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        hold_text(self, "stats", "the file that `kvevict statistics` wrote, or None")

    def check(self, policy: Policy) -> None:
        super().check(policy)
        at_least_0("eps", self.eps)

    @property
    def needs(self) -> tuple[Any, ...]:
        own = need("expected_attention", sink=self.sink, stats=self.stats)
        return own, need("value_norm", p=2)

    def score(self, slots: Slots, attention: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
        return (attention + self.eps) * size
