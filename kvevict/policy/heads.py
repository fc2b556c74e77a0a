"""Head budgets split the slots that a layer keeps over its kv heads. The fields of a head budget are its options.

A head budget gets a layer's `Slots`, the numbers that rank these slots, fp32 [B, Hkv, C], and the number of slots that
the layer keeps, [B]. It returns the number of slots that each head keeps, int32 [B, Hkv]. Their sum over heads is the
layer's number; each head keeps at least its protected slots and at most the slots that it has.
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
    ragged: ClassVar[bool] = True  # heads compete for slots, so they keep different numbers of slots

    def keep(self, slots: Slots, score: torch.Tensor, wanted: torch.Tensor, run: int = 1) -> torch.Tensor:
        """Split the wanted [B] slots of a layer over its heads: int32 [B, Hkv]. run: number of neighbouring tokens that
        the policy's selection keeps together."""
        raise NotImplementedError

    def reserve(self, slots: Slots, score: torch.Tensor, wanted: torch.Tensor, run: int = 1) -> torch.Tensor:
        """Return how many of its best slots each head must hold now, int32 [B, Hkv], so that a later `keep` with a
        smaller `wanted` gives the same result as on all slots."""
        return self.keep(slots, score, wanted, run)


@HEADS.add("equal")
@dataclass(frozen=True)
class Equal(HeadBudget):
    """Every head keeps equally many slots; the remainder goes to the lower heads. With keep_prompt=True, the prompt's
    slots are kept besides these."""

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

    f       share of the average number of slots per head that every head keeps without competing
    floor   "mix": a head keeps (1-f) times the slots that it wins in one ranking of all heads, plus f times the
            average, as in the source; "max": every head keeps its best slots, f times the average, and the best of all
            heads' other slots follow; "all": as "max", but protected slots count in the average, and as a head's best
            (kvpress)
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
        own = (own + 1e-9).clamp_min(0).long()  # 1e-9: rounding may leave a product just below a whole number
        mine = best(key, own) & (key > LOWEST)
        return (least + winners(key.masked_fill(mine, -LOWEST - 1), wanted)).to(torch.int32)

    def reserve(self, slots: Slots, score: torch.Tensor, wanted: torch.Tensor, run: int = 1) -> torch.Tensor:
        """Reserve the slots that a head wins in one ranking of all heads, even if `keep` gives it fewer, and at least
        one slot more than `keep` gives it, since rounding may differ for a smaller `wanted`."""
        won = slots.least + winners(order(slots, score, run), wanted - slots.least.sum(1))
        return torch.minimum(torch.maximum(won, self.keep(slots, score, wanted, run) + 1), slots.n).to(torch.int32)


@HEADS.add("flat")
@dataclass(frozen=True)
class Flat(HeadBudget):
    """EDIE's head budget: every head keeps its protected slots, and the best of all heads' other slots follow; no head
    has a minimum besides."""

    def keep(self, slots: Slots, score: torch.Tensor, wanted: torch.Tensor, run: int = 1) -> torch.Tensor:
        return (slots.least + winners(order(slots, score, run), wanted - slots.least.sum(1))).to(torch.int32)


def shares(slots: Numbers, heads: Numbers) -> Numbers:
    """Split a layer's slots [B] equally over heads 0 .. H - 1: int [B, H]. The remainder goes to the lower heads."""
    return slots[:, None] // len(heads) + (heads < (slots % len(heads))[:, None])


def order(slots: Slots, score: torch.Tensor, run: int = 1, first: int = 0, heads: int | None = None) -> torch.Tensor:
    """Return distinct sort keys of slots, int64 [B, Hkv, C]; the largest key is the best slot. Slots are ordered by
    score descending (NaN last), then position ascending, then head ascending (METHODS 8.5). With run > 1, slots of
    equal score are ordered by run (position // run), head and position, so that a head's run stays together. Protected
    slots and columns without a slot get LOWEST. For one ranking of several layers, `heads` is the number of heads of
    all layers, and `first` the number of this layer's first head among them."""
    bits = (score + 0.0).contiguous().view(torch.int32).long()  # + 0.0 gives -0.0 the bits of 0.0
    rank = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits).masked_fill(score.isnan(), -(2**31))
    own = slots.n.shape[1]
    heads = own if heads is None else heads
    position, head = slots.positions.long(), first + torch.arange(own, device=slots.device)[:, None]
    place = ((position // run) * heads + head) * run + position % run
    return ((rank << 32) + (2**32 - 1 - place)).masked_fill(~slots.competing, LOWEST)


def best(key: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Mark, along the last dimension of distinct keys [B, ..., C], the wanted[b] largest: bool, in the shape of key."""
    counts = wanted.clamp(1, key.shape[-1]).tolist()
    # `topk` and not `kthvalue`, which searches a row with a single thread block on a GPU
    bars = [row.topk(k, sorted=False).values.amin(-1, keepdim=True) for row, k in zip(key, counts, strict=True)]
    return (key >= torch.stack(bars)) & (wanted > 0).view(-1, *[1] * (key.ndim - 1))


def winners(key: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Count each head's slots among the layer's wanted[b] best slots: [B, Hkv]. key: sort keys [B, Hkv, C] of
    `order`."""
    return best(key.flatten(1), wanted).view_as(key).sum(-1)


def above(slots: Slots, score: torch.Tensor, bar: torch.Tensor) -> torch.Tensor:
    """Count each head's slots that are protected or score at least the threshold bar [B], fp32: int32 [B, Hkv]. A bar
    of -inf counts all slots, those with a score of NaN too."""
    enough = score.nan_to_num(nan=-torch.inf) >= bar[:, None, None]
    return (slots.least + (enough & slots.competing).sum(-1)).to(torch.int32)
