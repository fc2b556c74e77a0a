from dataclasses import dataclass
from typing import ClassVar

import torch

from ....policy.inputs import Observation, Slots
from . import QUANTITIES, Quantity, each_head


@QUANTITIES.add("lag")
@dataclass(frozen=True)
class Lag(Quantity):
    """A slot's rank within its part of the text, from 0 to 1 - 1 / part, by how much its key and value deviate when
    scaled by the part that follows (LagKV, eq. 4-9): [B, Hkv, C].

    part    tokens of a part; parts follow each other from position `sink` on

    Each channel of a part is scaled by its minimum and maximum in the next part. The deviation of a key or value is the
    standard deviation across channels, as softmax over the part; keys' and values' are averaged. Slots get NaN (no
    number) if their part, or the next one, is incomplete.
    """

    part: int = 128
    sink: int = 4
    observes: ClassVar[bool] = False

    def measure(self, slots: Slots, observation: Observation) -> torch.Tensor:
        heads = slots.kv.stored.len.shape[1]
        out = torch.full((slots.n.shape[0], heads, slots.columns), torch.nan, device=slots.device)
        places = (slots.positions.long() - self.sink).expand(-1, heads, -1)
        column = torch.arange(min(self.part, slots.columns), device=slots.device)
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
    """Deviations [P, part] of parts x [P, part, D] scaled by the next ones, without channels that are constant
    there."""
    low, high = following.amin(1, keepdim=True), following.amax(1, keepdim=True)
    scale = high - low
    varies = (scale > 0).expand_as(x)
    scaled = ((x - low) / scale).masked_fill(~varies, 0)
    count = varies.sum(-1, keepdim=True)
    centred = (scaled - scaled.sum(-1, keepdim=True) / count).masked_fill(~varies, 0)
    return (centred.square().sum(-1) / (count[..., 0] - 1)).sqrt().softmax(-1)
