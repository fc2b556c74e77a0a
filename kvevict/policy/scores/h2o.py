from dataclasses import dataclass
from typing import Any, ClassVar

from ..checks import count
from ..inputs import LayerRows, Policy
from ..rows.window import All
from . import SCORES, Score


@SCORES.add("h2o")
@dataclass(frozen=True)
class H2O(Score):
    """H2O (Zhang et al. 2023): attention summed over all rows so far, carried with the slot; `recent` slots are kept.

    `recent=None` is half the budget. Column sums come from a second pass over the rows' log-sum-exp, so they are exact
    under chunking; no attention matrix exists.
    """

    recent: int | None = None
    sink: ClassVar[int] = 0
    rows: ClassVar = All()
    needs: ClassVar[tuple[Any, ...]] = ("attention",)
    carry: ClassVar[str] = "sum"
    continues: ClassVar[bool] = True
    decodes: ClassVar[bool] = True

    @property
    def protected(self) -> Any:  # half of the smallest budget holds the sinks, so that the other half can be recent
        return self.sink, self.sink if self.recent is None else self.recent

    def protect(self, call: LayerRows) -> Any:
        return self.sink, (call.budget // 2 if self.recent is None else self.recent)

    def check(self, policy: Policy) -> None:
        super().check(policy)
        if self.recent is not None:
            count("recent", self.recent, 0)
