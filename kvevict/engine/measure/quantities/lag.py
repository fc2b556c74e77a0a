from dataclasses import dataclass
from typing import ClassVar

import torch

from ....policy.inputs import Observation, Slots
from . import QUANTITIES, Quantity, each_head


@QUANTITIES.add("lag")
@dataclass(frozen=True)
class Lag(Quantity):
    """A slot's rank in its part, from 0 to 1 - 1 / part, by how its key and value deviate, seen from the part of the
    text that follows (LagKV, eq. 4-9): [B, Hkv, C].

    part    tokens of a part; parts follow each other from position `sink` on

    A part is scaled by its successor's minimum and maximum per channel. Ranks are those of the softmax over the part of
    the standard deviation across channels, mean of keys' and values'. NaN (no number) for slots of an incomplete part,
    or of a part with an incomplete successor.
    """

    part: int = 128
    sink: int = 4
    observes: ClassVar[bool] = False

    def measure(self, slots: Slots, observation: Observation) -> torch.Tensor:
        heads = slots.kv.stored.len.shape[1]
        out = torch.full((slots.n.shape[0], heads, slots.columns), torch.nan, device=slots.device)
        places = (slots.positions.long() - self.sink).expand(-1, heads, -1)
        column = torch.arange(min(self.part, slots.columns), device=slots.device)  # a longer part is never whole
        for b, h, *kv in each_head(slots, "kv"):
            place = places[b, h, : len(kv[0])].contiguous()
            number = place.div(self.part, rounding_mode="floor")[place >= 0]
            whole = number.bincount() == self.part
            known = (whole[:-1] & whole[1:]).nonzero()[:, 0]
            here, there = (torch.searchsorted(place, at * self.part)[:, None] + column for at in (known, known + 1))
            score = sum(_deviations(x[here].float(), x[there].float()) for x in kv) / 2
            out[b, h, here] = score.argsort(dim=-1, stable=True).argsort(-1).float() / self.part
        return slots.heads.merge(out)


def _deviations(x: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """[P, part] deviations of parts x [P, part, D], scaled by the parts that follow. A channel without variation in the
    following part has no scale, and is left out."""
    low, high = following.amin(1, keepdim=True), following.amax(1, keepdim=True)
    scale = high - low
    varies = (scale > 0).expand_as(x)
    scaled = ((x - low) / scale).masked_fill(~varies, 0)
    count = varies.sum(-1, keepdim=True)
    centred = (scaled - scaled.sum(-1, keepdim=True) / count).masked_fill(~varies, 0)
    return (centred.square().sum(-1) / (count[..., 0] - 1)).sqrt().softmax(-1)
