from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..checks import flag
from ..inputs import Policy, Slots
from ..rows.window import Last
from . import SCORES, Score


@SCORES.add("tova")
@dataclass(frozen=True)
class TOVA(Score):
    """TOVA (Oren et al. 2024): attention of the last row, mean over all heads, one selection for the layer.

    `per_head=True` lets every kv head choose for itself (CAOTE's reading).
    """

    per_head: bool = False
    rows: ClassVar = Last()
    needs: ClassVar[tuple[Any, ...]] = ("attention",)
    continues: ClassVar[bool] = True
    decodes: ClassVar[bool] = True

    @property
    def shared(self) -> bool:
        return not self.per_head

    def check(self, policy: Policy) -> None:
        flag("per_head", self.per_head)

    def score(self, slots: Slots, attention: torch.Tensor) -> torch.Tensor:
        return attention if self.per_head else slots.heads.gather(attention).mean(1, keepdim=True)
