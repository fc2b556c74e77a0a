from dataclasses import dataclass
from typing import ClassVar

import torch

from ..checks import count
from ..inputs import Needs, OwnPolicy, Slots, need
from ..rows.window import All
from . import SCORES, Score

BLEND = (
    0.35  # weight of the leverage at any budget, since scores of several chunks compete (kvpress: the ratio removed)
)


@SCORES.add("compactor")
@dataclass(frozen=True)
class Compactor(Score):
    """Compactor (Chari & Van Durme 2025): outlying keys, and attention both ways in blocks; for later questions.

    sink     first slots that are always kept
    recent   last slots that are always kept

    The score is 0.35 times the keys' statistical leverage plus the attention, both in standard deviations.
    """

    sink: int = 8
    recent: int = 4
    rows: ClassVar = All()
    carry: ClassVar[str] = "keep"
    ordinal: ClassVar[bool] = True

    @property
    def protected(self) -> tuple[int, int]:
        return self.sink, self.recent

    def check(self, policy: OwnPolicy) -> None:
        super().check(policy)
        count("recent", self.recent, 0)

    @property
    def needs(self) -> Needs:
        ends = dict(sink=self.sink, recent=self.recent)
        return need("leverage", **ends), need("block_attention", **ends)

    def score(self, slots: Slots, leverage: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
        return BLEND * leverage + attention
