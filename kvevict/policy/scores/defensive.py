from dataclasses import dataclass
from typing import ClassVar

import torch

from ..inputs import Needs, OwnPolicy, Slots, need
from ..rows.window import Window
from . import SCORES, Score, check_kernel

COVER = 0.9  # share of the attention that protected and first-ranked slots get together, as in the authors' code
FIRST = 2.0**64  # factor that lifts the first-ranked scores above all others; a power of two causes no rounding


@SCORES.add("defensive")
@dataclass(frozen=True)
class Defensive(Score):
    """DefensiveKV (Feng et al. 2025): the largest attention over rows and heads, raised to its mean, times |W_O v|_1.

    kernel   number of neighbouring slots over which each row's attention is averaged

    The mean is over slots; W_O v is the value after the output projection. The slots with the largest mean attention
    over rows rank before all others: as many slots as get, together with the protected slots, 0.9 of the attention to
    all alive slots.
    """

    kernel: int = 5
    rows: ClassVar = Window()
    ordinal: ClassVar[bool] = True
    comparable: ClassVar[bool] = True

    def check(self, policy: OwnPolicy) -> None:
        super().check(policy)
        check_kernel(self.kernel)

    @property
    def needs(self) -> Needs:
        return need("attention", reduce="mean"), need("worst_attention", kernel=self.kernel), "output_norm"

    def score(self, slots: Slots, mean: torch.Tensor, worst: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        inside = slots.competing
        worst, norm = (x.masked_fill(~inside, 0) for x in (worst, norm))
        floor = worst.sum(-1, keepdim=True) / inside.sum(-1, keepdim=True).clamp_min(1)
        score = torch.maximum(worst, floor) * (norm / norm.sum(-1, keepdim=True).clamp_min(1e-30))
        wanted = COVER * mean.sum(-1, keepdim=True) - mean.masked_fill(inside, 0).sum(-1, keepdim=True)
        rank = mean.masked_fill(~inside, 0).sort(dim=-1, descending=True, stable=True)
        before = rank.values.cumsum(-1) - rank.values
        first = torch.zeros_like(inside).scatter(-1, rank.indices, (before < wanted) & (rank.values > 0))
        return torch.where(first, mean * FIRST, score)
