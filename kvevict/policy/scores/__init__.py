"""Scores say how important slots are. Each module registers the scores that it defines; a score's fields are its
options.

A score names the quantities that it `needs` (kvevict/engine/measure/quantities), gets their values and the `Slots` of
one layer, and returns fp32 [B, Hkv, C] (or [B, 1, C], shared by the heads), where column i is the score of alive slot
i. Pooling over neighbouring slots is a separate step. To protect slots, a score counts first and last slots (`protect`)
and never changes their scores.
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
    rows: ClassVar[Rows] = NoRows()  # `Policy.rows`, if a policy names none
    needs: ClassVar[Needs] = ()  # quantities that `score` is computed from
    factors: ClassVar[tuple[str, ...]] = ()  # quantities by which scores, carried or new, are multiplied
    carry: ClassVar[str] = "none"  # `Policy.carry`, if a policy names none
    per_query_head: ClassVar[bool] = False  # `score` returns [B, H, C], which `pooled` reduces to kv heads
    ordinal: ClassVar[bool] = False  # scores only rank slots: they may be negative, and their sums mean nothing
    comparable: ClassVar[bool] = False  # scores of different layers are on one scale, as layers="pool" needs
    largest: ClassVar[bool] = False  # a score is a maximum over rows, so a prompt may be repeated in parts
    shared: ClassVar[bool] = False  # all heads of a layer keep the same slots
    continues: ClassVar[bool] = False  # the method is for text that goes on without a question
    decodes: ClassVar[bool] = False  # evicting while decoding, at every token, is part of the method

    @property
    def protected(self) -> tuple[int, int]:
        """The numbers of first and of last slots that `protect` returns at the smallest budget; the observing rows' own
        slots are not among them."""
        return getattr(self, "sink", 0), getattr(self, "recent", 0)

    def protect(self, call: LayerRows) -> tuple[int, int | torch.Tensor]:
        """Return the number of first alive slots and the number of last alive slots (int or [B]) that are always
        kept."""
        return self.protected

    @property
    def own_interval(self) -> int:
        """The value of `Policy.interval` if a policy names none."""
        return 1 if self.decodes or self.carry == "sum" else 16

    @property
    def adds_attention(self) -> bool:
        """Whether the score is the sum over rows of attention weights, averaged over the query heads of a group."""
        return tuple(self.needs) == ("attention",) and not self.shared

    def check(self, policy: OwnPolicy) -> None:
        for name in ("sink", "recent"):
            if (value := getattr(self, name, None)) is not None:
                count(name, value, 0)

    def score(self, slots: Slots, *quantities: Any) -> torch.Tensor:
        """Return the unpooled score of every alive slot: [B, Hkv, C] or [B, 1, C]. quantities: the values of `needs`,
        in that order. By default there is one quantity, and it is the score."""
        if len(quantities) != 1:
            raise NotImplementedError
        return quantities[0]

    def plain(self, slots: Slots, score: torch.Tensor) -> torch.Tensor:
        """Return the unpooled score per kv head. score: the result of `score`."""
        return score

    def pooled(self, slots: Slots, score: torch.Tensor) -> torch.Tensor:
        """Return the numbers that rank slots: the scores, pooled over neighbouring slots if the method does so."""
        return score


DIGITS = 31  # of kernel="digits": a question attends to a number's first digit, and pooling keeps its other digits


@dataclass(frozen=True)
class Pooled(Score):
    """A score that is pooled over `kernel` neighbouring slots: their maximum (pool="max") or mean (pool="avg").

    kernel   odd number of neighbouring slots that are pooled; "digits": the number of tokens that 31 digits take in the
             model's tokenizer, or 31 without a tokenizer
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
        """Pool each head's unprotected slots with stride 1 (METHODS section 0). The maximum pads with -inf; the mean
        pads with 0 and divides by the kernel size. Returns [B, Hkv, C], where columns of protected slots are
        unspecified."""
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
    """Attention weights of the observing rows, reduced over rows, then over the query heads of a group. `reduce` and
    `group` are "sum", "mean" or "max"."""

    reduce: ClassVar[str] = "sum"
    group: ClassVar[str] = "mean"

    @property
    def needs(self) -> Needs:
        usual = (self.reduce, self.group) == ("sum", "mean")
        return ("attention",) if usual else (need("attention", reduce=self.reduce, group=self.group),)


load_folder(__name__)
