from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..checks import count
from ..inputs import LayerRows, Policy, Slots, need
from . import SCORES, Score


@SCORES.add("lagkv")
@dataclass(frozen=True)
class LagKV(Score):
    """LagKV (Liang et al. 2025): how keys and values deviate, seen from the next part of the text; no attention.

    lag     tokens of a part; the last whole one and all tokens after it are kept, until the next part is there
    sink    first slots that are always kept; parts begin after them

    A slot's number is its rank in its part, so that every part keeps as many.
    """

    lag: int = 128
    sink: int = 4
    carry: ClassVar[str] = "keep"
    ordinal: ClassVar[bool] = True

    @property
    def protected(self) -> Any:
        return self.sink, 2 * self.lag - 1

    def protect(self, call: LayerRows) -> Any:
        return self.sink, self.lag + (call.next_position - self.sink) % self.lag

    def check(self, policy: Policy) -> None:
        super().check(policy)
        count("lag", self.lag, 2)

    @property
    def needs(self) -> tuple[Any, ...]:
        return (need("lag", part=self.lag, sink=self.sink),)

    def score(self, slots: Slots, lag: torch.Tensor) -> torch.Tensor:
        return lag
