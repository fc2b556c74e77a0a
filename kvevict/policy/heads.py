"""How a layer's slots are split over its kv heads. The fields of a head budget are its options.

A head budget gets the layer's `Slots`, the numbers that rank them, fp32 [B, Hkv, C], and the layer's total [B]. It
returns each head's number of slots, int32 [B, Hkv]: their sum is the total, and each is at least the head's protected
slots and at most all its slots.
"""

from dataclasses import dataclass
from typing import ClassVar, TypeVar

import numpy as np
import torch

from .apportion import apportion
from .checks import fraction, one_of
from .inputs import OwnPolicy, Slots
from .registry import Part, Registry

HEADS: Registry = Registry("head budget")
LOWEST = torch.iinfo(torch.int64).min
Numbers = TypeVar("Numbers", torch.Tensor, np.ndarray)


@dataclass(frozen=True)
class HeadBudget(Part):
    ragged: ClassVar[bool] = True  # heads compete, so they end up with different numbers of slots

    def keep(self, slots: Slots, score: torch.Tensor, wanted: torch.Tensor, run: int = 1) -> torch.Tensor:
        """Split wanted [B] slots over the heads. run: number of tokens that a selection keeps together."""
        raise NotImplementedError

    def reserve(self, slots: Slots, score: torch.Tensor, wanted: torch.Tensor, run: int = 1) -> torch.Tensor:
        """Count the best slots of each head that a layer must hold for a later `keep` of fewer slots to split them as
        it would split all slots: int32 [B, Hkv]."""
        return self.keep(slots, score, wanted, run)


@HEADS.add("equal")
@dataclass(frozen=True)
class Equal(HeadBudget):
    """Every head gets the same, its prompt's slots aside where those stay; the remainder goes to lower heads."""

    ragged: ClassVar[bool] = False

    def keep(self, slots: Slots, score: torch.Tensor, wanted: torch.Tensor, run: int = 1) -> torch.Tensor:
        n, least, heads = slots.n - slots.past, slots.least - slots.past, slots.n.shape[1]
        wanted = wanted - slots.past.sum(1)
        keep = shares(wanted, torch.arange(heads, device=n.device))
        if bool(((keep > n) | (keep < least)).any()):
            keep = apportion(torch.ones_like(n), wanted, least, n)
        return (slots.past + keep).to(torch.int32)


@HEADS.add("ada")
@dataclass(frozen=True)
class Ada(HeadBudget):
    """AdaKV (Feng et al. 2024): heads compete for the slots that are not protected.

    f       the fraction of a head's slots that it keeps without competing
    floor   "mix": (1-f) times the slots that a head wins over all heads, plus f times the average, as in the source;
            "max": every head keeps its own best f times the average, then the best of the rest over all heads follow;
            "all": as "max", over all of a head's slots: protected ones count as its best (kvpress)
    """

    f: float = 0.2
    floor: str = "mix"

    def check(self, policy: OwnPolicy) -> None:
        fraction("f", self.f)
        one_of("floor", self.floor, ("mix", "max", "all"))

    def keep(self, slots: Slots, score: torch.Tensor, wanted: torch.Tensor, run: int = 1) -> torch.Tensor:
        key, least, heads = order(slots, score, run), slots.least, slots.n.shape[1]
        total, wanted = wanted, wanted - least.sum(1)
        even = self.f * wanted.double() / heads
        if self.floor == "mix":
            mixed = (1 - self.f) * winners(key, wanted).double() + even[:, None]
            return (least + apportion(mixed, wanted, torch.zeros_like(least), slots.n - least)).to(torch.int32)
        own = even if self.floor == "max" else self.f * total.double() / heads - least.amax(1)
        own = (own + 1e-9).clamp_min(0).long()  # a rounding error may keep a product just below a whole number
        mine = best(key, own) & (key > LOWEST)
        return (least + winners(key.masked_fill(mine, -LOWEST - 1), wanted)).to(torch.int32)

    def reserve(self, slots: Slots, score: torch.Tensor, wanted: torch.Tensor, run: int = 1) -> torch.Tensor:
        """Reserve at least the slots that a head wins, some of which `keep` may give away; one more, for rounding."""
        won = slots.least + winners(order(slots, score, run), wanted - slots.least.sum(1))
        return torch.minimum(torch.maximum(won, self.keep(slots, score, wanted, run) + 1), slots.n).to(torch.int32)


@HEADS.add("flat")
@dataclass(frozen=True)
class Flat(HeadBudget):
    """EDIE: the protected slots of every head, then the best of the rest over all heads; no floor."""

    def keep(self, slots: Slots, score: torch.Tensor, wanted: torch.Tensor, run: int = 1) -> torch.Tensor:
        return (slots.least + winners(order(slots, score, run), wanted - slots.least.sum(1))).to(torch.int32)


def shares(slots: Numbers, heads: Numbers) -> Numbers:
    """Split slots [B] of a layer equally over heads 0 .. H - 1, the remainder to lower ones: int [B, H]."""
    return slots[:, None] // len(heads) + (heads < (slots % len(heads))[:, None])


def order(slots: Slots, score: torch.Tensor, run: int = 1, first: int = 0, heads: int | None = None) -> torch.Tensor:
    """Rank the slots by distinct keys, int64 [B, Hkv, C], the largest first: score descending, position ascending, head
    ascending (METHODS 8.5), NaN last. The tokens of a run of `run` positions stay together. Slots that do not compete,
    because they are protected or do not exist, get LOWEST. For layers that compete: `heads` counts the heads of all
    layers, and `first` is the number of this layer's first head among them."""
    bits = (score + 0.0).contiguous().view(torch.int32).long()  # -0 and 0 are equal
    rank = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits).masked_fill(score.isnan(), -(2**31))
    own = slots.n.shape[1]
    heads = own if heads is None else heads
    position, head = slots.positions.long(), first + torch.arange(own, device=slots.device)[:, None]
    place = ((position // run) * heads + head) * run + position % run
    return ((rank << 32) + (2**32 - 1 - place)).masked_fill(~slots.competing, LOWEST)


def best(key: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Mark the wanted[b] largest of the keys [B, ..., C] along the last dimension: bool, shaped as key."""
    counts = wanted.clamp(1, key.shape[-1]).tolist()
    # topk, since a GPU's kthvalue searches a row with one block
    bars = [row.topk(k, sorted=False).values.amin(-1, keepdim=True) for row, k in zip(key, counts, strict=True)]
    return (key >= torch.stack(bars)) & (wanted > 0).view(-1, *[1] * (key.ndim - 1))


def winners(key: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Count each head's slots among a layer's wanted[b] best, by keys [B, Hkv, C] of `order`: [B, Hkv]."""
    return best(key.flatten(1), wanted).view_as(key).sum(-1)


def above(slots: Slots, score: torch.Tensor, bar: torch.Tensor) -> torch.Tensor:
    """Count each head's slots that are protected or score at least bar [B], fp32: int32 [B, Hkv]. With a bar of -inf
    all slots count, NaN too."""
    enough = score.nan_to_num(nan=-torch.inf) >= bar[:, None, None]
    return (slots.least + (enough & slots.competing).sum(-1)).to(torch.int32)
