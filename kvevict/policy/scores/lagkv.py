from dataclasses import dataclass
from typing import ClassVar

import torch

from ..inputs import LayerRows, Needs, need
from . import SCORES, Score


@SCORES.add("lagkv")
@dataclass(frozen=True)
class LagKV(Score):
    """LagKV (Liang et al. 2025): how keys and values deviate, seen from the next part of the text; no attention.

    sink   first slots that are always kept; parts begin after them

    A part has 128 tokens. A slot's score is its rank in its part, so that all parts keep equally many slots. The last
    whole part and all tokens after it are kept until the next part is whole.
    """

    sink: int = 4
    lag: ClassVar[int] = 128  # the paper's
    carry: ClassVar[str] = "keep"
    ordinal: ClassVar[bool] = True

    @property
    def protected(self) -> tuple[int, int]:
        return self.sink, 2 * self.lag - 1

    def protect(self, call: LayerRows) -> tuple[int, torch.Tensor]:
        return self.sink, self.lag + (call.next_position - self.sink) % self.lag

    @property
    def needs(self) -> Needs:
        return (need("lag", part=self.lag, sink=self.sink),)
