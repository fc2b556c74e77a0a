from dataclasses import dataclass

import torch

from ..apportion import apportion
from ..checks import fraction, one_of
from ..inputs import Policy, Slots
from . import HEADS, LOWEST, HeadBudget, best, order, winners


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

    def check(self, policy: Policy) -> None:
        fraction("f", self.f)
        one_of("floor", self.floor, ("mix", "max", "all"))

    def keep(self, slots: Slots, score: torch.Tensor, wanted: torch.Tensor, run: int = 1) -> torch.Tensor:
        key, least, heads = order(slots, score, run), slots.least, slots.n.shape[1]
        whole, wanted = wanted, wanted - least.sum(1)
        even = self.f * wanted.double() / heads
        if self.floor != "mix":
            own = even if self.floor == "max" else self.f * whole.double() / heads - least.amax(1)
            own = (own + 1e-9).clamp_min(0).long()  # f * b may be whole but for a rounding error
            mine = best(key, own) & (key > LOWEST)
            return (least + winners(key.masked_fill(mine, -LOWEST - 1), wanted)).to(torch.int32)
        mixed = (1 - self.f) * winners(key, wanted).double() + even[:, None]
        return (least + apportion(mixed, wanted, torch.zeros_like(least), slots.n - least)).to(torch.int32)

    def reserve(self, slots: Slots, score: torch.Tensor, wanted: torch.Tensor, run: int = 1) -> torch.Tensor:
        """Reserve the winners too, since the average may take slots from them; one more each, for rounding."""
        won = slots.least + winners(order(slots, score, run), wanted - slots.least.sum(1))
        return torch.minimum(torch.maximum(won, self.keep(slots, score, wanted, run) + 1), slots.n).to(torch.int32)
