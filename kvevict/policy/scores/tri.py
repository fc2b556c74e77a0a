from dataclasses import dataclass
from typing import Any, ClassVar

from ..checks import hold_text
from ..inputs import need
from . import SCORES, Score


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
        hold_text(self, "stats", "the file that `kvevict statistics` wrote, or None")

    @property
    def needs(self) -> tuple[Any, ...]:
        return (need("trigonometric", sink=self.sink, stats=self.stats),)
