"""Scores that sum the attention of every row."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..inputs import LayerRows, Needs
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
    needs: ClassVar[Needs] = ("attention",)
    carry: ClassVar[str] = "sum"
    continues: ClassVar[bool] = True
    decodes: ClassVar[bool] = True

    @property
    def protected(self) -> tuple[int, int]:  # half of the smallest budget has the sinks, so the other half is as large
        return self.sink, self.sink if self.recent is None else self.recent

    def protect(self, call: LayerRows) -> tuple[int, int | torch.Tensor]:
        return self.sink, (call.budget // 2 if self.recent is None else self.recent)


@SCORES.add("vatp")
@dataclass(frozen=True)
class VATP(H2O):
    """VATP (Guo et al. 2024): H2O's sums times the 1-norm of the value; the first `sink` slots are kept."""

    sink: int = 20
    decodes: ClassVar[bool] = False
    factors: ClassVar[tuple[str, ...]] = ("value_norm",)
