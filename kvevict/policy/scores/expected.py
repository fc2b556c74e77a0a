"""Scores of keys by the queries that are expected, from statistics of earlier queries."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..checks import hold_text
from ..inputs import Needs, Slots, need
from . import SCORES, Score

EPSILON = 0.01  # the paper's: a slot that no query is expected to attend to counts by its value's norm alone
FILE = "the file that `kvevict statistics` wrote, or None"


@SCORES.add("expected")
@dataclass(frozen=True)
class Expected(Score):
    """Expected Attention (Devoto et al. 2025): the expected attention of queries like those so far, plus 0.01, times
    ||v_i||_2.

    sink    first slots that are always kept; they, and the queries at these positions, take no part
    stats   file with the mean and the covariance of the model's queries, from `kvevict statistics`; None: those of the
            text read so far
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

    sink    first slots that are always kept; the queries at these positions are not in the mean
    stats   file with the means of the model's queries, from `kvevict statistics`; None: those of the prompts read
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
