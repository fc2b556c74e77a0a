from dataclasses import dataclass

from ..checks import count, one_of
from . import SCORES, Score, check_pool, pool


@SCORES.add("snapkv")
@dataclass(frozen=True)
class SnapKV(Score):
    """SnapKV (Li et al. 2024): attention of the last `window` rows, pooled; the window's own slots are kept."""

    window: int = 32
    kernel: int = 7
    pool: str = "max"
    reduce: str = "sum"

    @property
    def rows(self):
        return self.window

    def protect(self, view):
        return 0, self.window

    def smallest_budget(self):
        return self.window + 1

    def check(self, policy):
        count("window", self.window, 1)
        check_pool(self.kernel, self.pool)
        one_of("reduce", self.reduce, ("sum", "mean", "max"))

    def score(self, view):
        return view.attention(rows=self.window, reduce=self.reduce)

    def pooled(self, view, score):
        return pool(score, view, self.kernel, self.pool)
