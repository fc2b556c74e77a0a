from dataclasses import dataclass
from typing import ClassVar

from ..checks import count
from . import SCORES, Score


@SCORES.add("h2o")
@dataclass(frozen=True)
class H2O(Score):
    """H2O (Zhang et al. 2023): attention summed over all rows so far, carried with the slot; `recent` slots are kept.

    `recent=None` is half the budget. Column sums come from a second pass over the rows' log-sum-exp, so they are exact
    under chunking; no attention matrix exists.
    """

    recent: int | None = None
    decodes: ClassVar[bool] = True
    interval: ClassVar[int] = 1
    carries: ClassVar[bool] = True
    last_row: ClassVar[bool] = True

    def protect(self, view):
        return 0, (view.budget // 2 if self.recent is None else self.recent)

    def smallest_budget(self):
        return (self.recent or 0) + 1

    def check(self, policy):

        if self.recent is not None:
            count("recent", self.recent, 0)

    def increment(self, view):
        return view.attention(reduce="sum")

    def score(self, view):
        return view.carry
