from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..checks import at_least_0, count
from ..inputs import Policy, Slots, need
from ..rows.window import All
from . import SCORES, Score


@SCORES.add("compactor")
@dataclass(frozen=True)
class Compactor(Score):
    """Compactor (Chari & Van Durme 2025): outlying keys, and attention both ways in blocks; for later questions.

    blend    weight of the keys' statistical leverage beside attention, both in standard deviations
    sink     first slots that are always kept
    recent   last slots that are always kept
    """

    blend: float = 0.35
    sink: int = 8
    recent: int = 4
    rows: ClassVar = All()
    carry: ClassVar[str] = "keep"
    ordinal: ClassVar[bool] = True

    @property
    def protected(self) -> Any:
        return self.sink, self.recent

    def check(self, policy: Policy) -> None:
        super().check(policy)
        at_least_0("blend", self.blend)
        count("recent", self.recent, 0)

    @property
    def needs(self) -> tuple[Any, ...]:
        ends = dict(sink=self.sink, recent=self.recent)
        return need("leverage", **ends), need("block_attention", **ends)

    def score(self, slots: Slots, leverage: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
        return self.blend * leverage + attention
