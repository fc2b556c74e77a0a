"""Scores that depend on keys, values or positions alone, without attention."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..checks import count, flag
from ..inputs import LayerRows, Needs, OwnPolicy, Slots, need
from . import SCORES, Score


@SCORES.add("streaming")
@dataclass(frozen=True)
class Streaming(Score):
    """StreamingLLM (Xiao et al. 2023): the first `sink` slots and the most recent slots are kept."""

    sink: int = 4
    continues: ClassVar[bool] = True
    decodes: ClassVar[bool] = True
    ordinal: ClassVar[bool] = True

    def score(self, slots: Slots) -> torch.Tensor:
        return torch.arange(slots.columns, dtype=torch.float32, device=slots.device).expand(*slots.n.shape, -1)


@SCORES.add("knorm")
@dataclass(frozen=True)
class KNorm(Score):
    """K-norm (Devoto et al. 2024): the score is `-||k_i||_2`, so slots with small keys are kept."""

    ordinal: ClassVar[bool] = True
    needs: ClassVar[Needs] = ("key_norm",)

    def score(self, slots: Slots, norm: torch.Tensor) -> torch.Tensor:
        return -norm


@SCORES.add("keydiff")
@dataclass(frozen=True)
class KeyDiff(Score):
    """KeyDiff (Park et al. 2025): the score is `-cos(k_i, mean k)`, where the mean is over the head's alive keys.

    unit   True: keys are scaled to norm 1 before they are averaged
    """

    unit: bool = False
    ordinal: ClassVar[bool] = True

    def check(self, policy: OwnPolicy) -> None:
        flag("unit", self.unit)

    @property
    def needs(self) -> Needs:
        return (need("key_cosine", unit=self.unit),)

    def score(self, slots: Slots, cosine: torch.Tensor) -> torch.Tensor:
        return -cosine


@SCORES.add("random")
@dataclass(frozen=True)
class Random(Score):
    """Random: a hash of (seed, layer, kv head, position), so that a row keeps the same slots in any batch.

    redraw   True: the number of tokens read so far is hashed, too, so that every eviction draws anew among the slots
             that are left, and old slots become ever rarer (Random Attention, 2609.03430)
    recent   number of last slots that are always kept; None: 64 with redraw=True, else 0
    """

    seed: int = 0
    redraw: bool = False
    recent: int | None = None
    continues: ClassVar[bool] = True
    ordinal: ClassVar[bool] = True

    @property
    def protected(self) -> tuple[int, int]:
        return 0, (64 if self.redraw else 0) if self.recent is None else self.recent

    @property
    def own_interval(self) -> int:
        return 64 if self.redraw else 16

    def check(self, policy: OwnPolicy) -> None:
        super().check(policy)
        count("seed", self.seed, 0)
        flag("redraw", self.redraw)

    def score(self, slots: Slots) -> torch.Tensor:
        head = slots.heads.numbers(slots.device)[:, None]
        x = slots.positions.long() * 0x9E3779B1 + head * 0x85EBCA77 + slots.index * 0xC2B2AE3D + self.seed * 0x27D4EB2F
        if self.redraw:  # the largest position is the newest token's: all heads of a batch row add one number
            x = x + (slots.positions.amax((1, 2), keepdim=True).long() + 1) * 0x165667B1
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):  # finaliser of a 32-bit hash, exact in int64
            x = x & 0xFFFFFFFF
            x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
        return ((x ^ (x >> 16)) >> 8).float()


@SCORES.add("lagkv")
@dataclass(frozen=True)
class LagKV(Score):
    """LagKV (Liang et al. 2025): spread of a slot's key and value, scaled by the next part of the text; no attention.

    sink   number of first slots that are always kept; the text after them is split into parts

    A part has 128 tokens. A slot's score is its rank in its part, so that all parts keep equally many slots. The last
    complete part and all tokens after it are kept, because a part is scored only when the next part is complete.
    """

    sink: int = 4
    lag: ClassVar[int] = 128  # number of tokens in a part, as in the paper
    carry: ClassVar[str] = "keep"
    ordinal: ClassVar[bool] = True

    @property
    def protected(self) -> tuple[int, int]:
        return self.sink, 2 * self.lag - 1

    def protect(self, call: LayerRows) -> tuple[int, torch.Tensor]:
        return self.sink, self.lag + (call.next_position - self.sink) % self.lag

    @property
    def needs(self) -> Needs:
        return (need("lag", part=self.lag, sink=self.sink),)
