from dataclasses import dataclass
from typing import ClassVar

import torch

from ....policy.inputs import Observation, Slots
from . import QUANTITIES, Quantity, each_head


@QUANTITIES.add("lag")
@dataclass(frozen=True)
class Lag(Quantity):
    """A slot's rank within its part of the text by the spread of its key and value (LagKV, eq. 4-9): [B, Hkv, C], from
    0 for the smallest spread to 1 - 1 / part.

    part    number of tokens of a part
    sink    position at which the first part begins; the parts follow each other without gaps

    Each channel of a part's keys is scaled by its minimum and maximum in the next part. A key's spread is its standard
    deviation across the scaled channels, then a softmax over the slots of the part. Values are treated alike, and the
    two spreads are averaged. Slots get NaN (no score) if the head lacks a slot of their part or of the next one.
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
    """The spread [P, part] of each row of P parts x [P, part, D]: the standard deviation across channels, each scaled
    by its minimum and maximum in the next part, then a softmax over the part. following [P, part, D]: each part's next
    one; channels that are constant in it are left out."""
    low, high = following.amin(1, keepdim=True), following.amax(1, keepdim=True)
    scale = high - low
    varies = (scale > 0).expand_as(x)
    scaled = ((x - low) / scale).masked_fill(~varies, 0)
    count = varies.sum(-1, keepdim=True)
    centred = (scaled - scaled.sum(-1, keepdim=True) / count).masked_fill(~varies, 0)
    return (centred.square().sum(-1) / (count[..., 0] - 1)).sqrt().softmax(-1)
