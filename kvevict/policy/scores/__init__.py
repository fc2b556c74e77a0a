"""Scores of slots. A file holds a score or a few related ones, and registers them; a score's fields are its options.

A score names the quantities that it `needs` (kvevict/engine/measure/quantities), gets them with the `Slots` of one
layer, and returns fp32 [B, Hkv, C] (or [B, 1, C], shared by the heads): column i is the score of alive slot i. Pooling
is a separate step. A score protects slots by counting them from either end, never by changing scores.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from ..checks import count, one_of
from ..inputs import LayerRows, Needs, OwnPolicy, Slots, need
from ..registry import Part, Registry, load_folder
from ..rows import Rows
from ..rows.window import NoRows, Window

SCORES: Registry = Registry("score")


@dataclass(frozen=True)
class Score(Part):
    rows: ClassVar[Rows] = NoRows()  # the method's rows, where a policy names none
    needs: ClassVar[Needs] = ()  # quantities that `score` is computed from
    factors: ClassVar[tuple[str, ...]] = ()  # quantities by which scores are multiplied, carried ones too
    carry: ClassVar[str] = "none"  # `Policy.carry`, where a policy names none
    per_query_head: ClassVar[bool] = False  # `score` is [B, H, C], reduced to kv heads when it is pooled
    ordinal: ClassVar[bool] = False  # scores only rank slots: they may be negative, and their sums mean nothing
    comparable: ClassVar[bool] = False  # scores of different layers compare, as layers="pool" needs
    largest: ClassVar[bool] = False  # a slot's score is its largest over the rows of all parts of a repeated prompt
    shared: ClassVar[bool] = False  # one choice for all heads of a layer
    continues: ClassVar[bool] = False  # for text that goes on, without a question
    decodes: ClassVar[bool] = False  # evicting while decoding, at every token, is part of the method

    @property
    def protected(self) -> tuple[int, int]:
        """How many first and last slots `protect` keeps at the smallest budget, beside the rows' slots."""
        return getattr(self, "sink", 0), getattr(self, "recent", 0)

    def protect(self, call: LayerRows) -> tuple[int, int | torch.Tensor]:
        """Count the first and the last alive slots that are always kept; of the last ones a number, or one per row."""
        return self.protected

    @property
    def own_interval(self) -> int:
        """`Policy.interval`, where a policy names none."""
        return 1 if self.decodes or self.carry == "sum" else 16

    @property
    def adds_attention(self) -> bool:
        """Whether a row adds its attention weights, mean over the group, to the score."""
        return tuple(self.needs) == ("attention",) and not self.shared

    def check(self, policy: OwnPolicy) -> None:
        for name in ("sink", "recent"):
            if (value := getattr(self, name, None)) is not None:
                count(name, value, 0)

    def score(self, slots: Slots, *quantities: Any) -> torch.Tensor:
        """Return the importance of every alive slot, not pooled: [B, Hkv, C] or [B, 1, C]. quantities: as in `needs`;
        by default the only one is the score."""
        if len(quantities) != 1:
            raise NotImplementedError
        return quantities[0]

    def plain(self, slots: Slots, score: torch.Tensor) -> torch.Tensor:
        """Return the score of kv heads, not pooled."""
        return score

    def pooled(self, slots: Slots, score: torch.Tensor) -> torch.Tensor:
        """Return the numbers that rank slots: their scores pooled over neighbours."""
        return score


DIGITS = 31  # kernel="digits": a question attends to a number's first digit, and the pool keeps the rest of it


@dataclass(frozen=True)
class Pooled(Score):
    """A score that is pooled over `kernel` neighbouring slots, by their largest ("max") or mean ("avg").

    kernel   slots that pooling looks at, an odd number; "digits": as many as hold 31 digits of a number, by the model's
             tokenizer, and 31 without a tokenizer
    """

    kernel: int | str = 7
    pool: str = "max"
    rows: ClassVar[Rows] = Window()

    def check(self, policy: OwnPolicy) -> None:
        super().check(policy)
        one_of("pool", self.pool, ("max", "avg", "none"))
        if self.kernel != "digits":
            check_kernel(self.kernel)

    def pooled(self, slots: Slots, score: torch.Tensor) -> torch.Tensor:
        """Pool each head's unprotected slots with stride 1 (METHODS section 0): max pads with -inf, avg divides by the
        kernel size with zero padding. Columns of protected slots are unspecified. Shape stays [B, Hkv, C]."""
        size = DIGITS if isinstance(self.kernel, str) else self.kernel
        if self.pool == "none" or size == 1 or score.shape[-1] == 0:
            return score
        if self.pool == "max":
            return F.max_pool1d(score.masked_fill(~slots.competing, -torch.inf), size, 1, size // 2)
        return F.avg_pool1d(score.masked_fill(~slots.competing, 0), size, 1, size // 2)


def check_kernel(kernel: object) -> None:
    """Raise TypeError or ValueError unless the kernel is an odd number of slots."""
    if count("kernel", kernel, 1) % 2 == 0:
        raise ValueError(f"kernel must be odd, so that pooling keeps the length, got {kernel}")


@dataclass(frozen=True)
class Attention(Pooled):
    """Attention of the observers, reduced over rows, then over the query heads of a group ("sum", "mean" or "max")."""

    reduce: ClassVar[str] = "sum"
    group: ClassVar[str] = "mean"

    @property
    def needs(self) -> Needs:
        usual = (self.reduce, self.group) == ("sum", "mean")
        return ("attention",) if usual else (need("attention", reduce=self.reduce, group=self.group),)


load_folder(__name__)
