"""Scores of keys by future queries, which are estimated from statistics of earlier queries."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..checks import hold_text
from ..inputs import Needs, Slots, need
from . import SCORES, Score

EPSILON = 0.01  # the paper's epsilon: slots without expected attention are ranked by their values' norms
FILE = "the file that `kvevict statistics` wrote, or None"


@SCORES.add("expected")
@dataclass(frozen=True)
class Expected(Score):
    """Expected Attention (Devoto et al. 2025): attention expected of queries like the earlier ones, times ||v_i||_2.

    sink    number of first slots that are always kept; their keys are not scored, and the queries at their positions
            are not in the statistics
    stats   file that `kvevict statistics` wrote, with the mean and the covariance of the model's queries; None: mean
            and covariance of the queries of the text read so far

    Before the product, 0.01 is added to the expected attention.
    """

    sink: int = 4
    stats: object = None
    comparable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        hold_text(self, "stats", FILE)

    @property
    def needs(self) -> Needs:
        return need("expected_attention", sink=self.sink, stats=self.stats), need("value_norm", p=2)

    def score(self, slots: Slots, attention: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
        return (attention + EPSILON) * size


@SCORES.add("tri")
@dataclass(frozen=True)
class Tri(Score):
    """TriAttention (2604.04921): a key's products with the mean query at distances 1, 2, 4 .. 65536, for long answers.

    sink    number of first slots that are always kept; the queries at their positions are not in the mean
    stats   file that `kvevict statistics` wrote, with the means of the model's queries; None: means over the prompts
            that were read
    """

    sink: int = 4
    stats: object = None
    continues: ClassVar[bool] = True
    ordinal: ClassVar[bool] = True
    own_interval: ClassVar[int] = 128

    def __post_init__(self) -> None:
        hold_text(self, "stats", FILE)

    @property
    def needs(self) -> Needs:
        return (need("trigonometric", sink=self.sink, stats=self.stats),)
