from dataclasses import dataclass
from typing import ClassVar

from ..checks import finite, fraction
from ..needs import need
from ..rows.window import Window
from . import SCORES, Pooled


@SCORES.add("rkv")
@dataclass(frozen=True)
class RKV(Pooled):
    """R-KV (2505.24133): attention of the last 8 rows less what other keys repeat of a slot's, for long answers.

    mix     `mix * importance - (1 - mix) * redundancy`; the importance alone is pooled
    alike   cosine above which two keys are copies, of which the newest is spared
    """

    mix: float = 0.1
    alike: float = 0.5
    rows: ClassVar = Window(8)
    ordinal: ClassVar[bool] = True
    own_interval: ClassVar[int] = 128

    def check(self, policy):
        super().check(policy)
        fraction("mix", self.mix)
        finite("alike", self.alike)

    @property
    def needs(self):
        return "group_attention", need("redundancy", alike=self.alike)

    def score(self, slots, importance, redundancy):
        pooled = super().pooled(slots, importance).masked_fill(~slots.competing, 0)
        return self.mix * pooled - (1 - self.mix) * redundancy

    def pooled(self, slots, score):
        return score
