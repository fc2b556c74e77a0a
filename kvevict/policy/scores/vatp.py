from dataclasses import dataclass

from ..checks import count, one_of
from . import SCORES, Score


@SCORES.add("vatp")
@dataclass(frozen=True)
class VATP(Score):
    """VATP (Guo et al. 2024): attention times the 1-norm of the value; the first `sink` slots are kept.

    base     "h2o": attention summed over all rows so far, `recent` slots kept (None: half the budget);
             "snapkv": summed over the last `window` rows, which are kept (PAASVN, EDIE eq. 4)
    """

    base: str = "h2o"
    sink: int = 20
    recent: int | None = None
    window: int = 32

    @property
    def interval(self):
        return 1 if self.base == "h2o" else 16

    @property
    def carries(self):
        return self.base == "h2o"

    @property
    def last_row(self):
        return self.base == "h2o"

    @property
    def rows(self):
        return 0 if self.base == "h2o" else self.window

    def protect(self, view):
        if self.base == "snapkv":
            return self.sink, self.window
        return self.sink, (view.budget // 2 if self.recent is None else self.recent)

    def smallest_budget(self):
        if self.base == "snapkv":
            return self.sink + self.window + 1
        return (2 * self.sink if self.recent is None else self.sink + self.recent) + 1

    def check(self, policy):
        one_of("base", self.base, ("h2o", "snapkv"))
        count("sink", self.sink, 0)
        count("window", self.window, 1)
        if self.recent is not None:
            count("recent", self.recent, 0)

    def increment(self, view):
        return view.attention(reduce="sum")

    def score(self, view):
        attention = view.carry if self.base == "h2o" else view.attention(rows=self.window)
        return attention * view.norm("v", 1)
