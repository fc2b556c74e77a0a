from dataclasses import dataclass

import torch

from ....policy.inputs import Observation, Slots
from .. import moments
from ..rope import Rope
from . import QUANTITIES, each_head
from .expected import OfQueries, QueryMoments, rotated_ahead

AHEAD = tuple(1 << n for n in range(17))  # distances from the last token: 1 .. 65,536


@QUANTITIES.add("trigonometric")
@dataclass(frozen=True)
class Trigonometric(OfQueries):
    """The score of each slot in TriAttention (2604.04921): [B, Hkv, C].

    Rotation acts on pairs f of dimensions, written as complex numbers: q_f of a query before rotation and k_f of a key.
    w_f is the pair's frequency, and phi_f the angle between the mean query E q_f, rotated to the last position, and the
    key k_f at its own position. A query head's score is the sum over f of
    |E q_f| |k_f| mean_D cos(w_f D + phi_f) + (E|q_f| - |E q_f|) |k_f|, for the distances D = 1, 2, 4 .. 65536. It is
    scaled to mean 0 and variance 1 over the slots that compete, and the largest score of a group is the result. A
    dimension that is not rotated forms a pair alone.
    """

    def measure(
        self, slots: Slots, observation: Observation, rope: Rope, of_queries: QueryMoments, last: torch.Tensor
    ) -> torch.Tensor:
        stored, width = slots.kv.stored, slots.kv.k.shape[3]
        mean, _, size = of_queries
        partner = rope.partners(width, mean.device)
        alone = partner == torch.arange(width, device=mean.device)
        spread = (size - moments.sizes(mean, partner)) * torch.where(alone, 1.0, 0.5)  # two dimensions per pair
        later = rotated_ahead(rope, last, mean[:, :, None], torch.tensor(AHEAD))[:, :, 0]
        heads, group = stored.len.shape[1], mean.shape[1] // stored.len.shape[1]
        out = torch.zeros(slots.n.shape[0], heads, slots.columns, device=slots.device)
        for b, h, keys in each_head(slots, "k"):
            keys, mine, own = keys.float(), slice(h * group, (h + 1) * group), min(h, slots.n.shape[1] - 1)
            score = later[b, mine] @ keys.T + spread[b, mine] @ moments.sizes(keys, partner).T
            inside = score[:, slots.competing[b, own, : len(keys)]]
            if inside.shape[1]:
                centre, scale = inside.mean(1, keepdim=True), inside.std(1, keepdim=True, correction=0)
                out[b, h, : len(keys)] = ((score - centre) / scale.clamp_min(1e-6)).amax(0)
        return slots.heads.reduce(out, "max")
