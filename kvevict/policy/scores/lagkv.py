from dataclasses import dataclass
from typing import Any, ClassVar

from ..inputs import LayerRows, need
from . import SCORES, Score


@SCORES.add("lagkv")
@dataclass(frozen=True)
class LagKV(Score):
    """LagKV (Liang et al. 2025): how keys and values deviate, seen from the next part of the text; no attention.

    sink   first slots that are always kept; parts begin after them

    A part has 128 tokens. A slot's number is its rank in its part, so that every part keeps as many. The last whole
    part and all tokens after it are kept, until the next part is there.
    """

    sink: int = 4
    lag: ClassVar[int] = 128  # the paper's
    carry: ClassVar[str] = "keep"
    ordinal: ClassVar[bool] = True

    @property
    def protected(self) -> Any:
        return self.sink, 2 * self.lag - 1

    def protect(self, call: LayerRows) -> Any:
        return self.sink, self.lag + (call.next_position - self.sink) % self.lag

    @property
    def needs(self) -> tuple[Any, ...]:
        return (need("lag", part=self.lag, sink=self.sink),)
