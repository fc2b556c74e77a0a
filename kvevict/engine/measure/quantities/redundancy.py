from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from ....policy.inputs import Observation, Slots
from . import QUANTITIES, Quantity, per_head
from .worst_attention import logits

ALIKE = 0.5  # cosine above which two keys count as copies, as in R-KV's source
BLOCK = 512  # number of rows of a head's matrix of cosines that are computed at once, to bound the memory


@QUANTITIES.add("redundancy")
@dataclass(frozen=True)
class Redundancy(Quantity):
    """The redundancy of each key (R-KV, 2505.24133): its mean cosine to the head's other keys, then a softmax over the
    head's alive slots: [B, Hkv, C]. In the mean of key j the cosine to a key i counts as 0 if j is the newest of i's
    copies (other keys whose cosine to i is above `ALIKE`)."""

    observes: ClassVar[bool] = False

    def measure(self, slots: Slots, observation: Observation) -> torch.Tensor:
        return per_head(slots, "k", self._of)

    def _of(self, keys: torch.Tensor) -> torch.Tensor:
        unit, column = F.normalize(keys.float(), dim=-1), torch.arange(len(keys), device=keys.device)
        total = torch.zeros(len(keys), device=keys.device)
        for rows in column.split(BLOCK) if len(keys) else ():
            cosine = unit[rows] @ unit.T
            cosine[rows - rows[0], rows] = 0
            newest = torch.where(cosine > ALIKE, column, -1).amax(1, keepdim=True)
            total += cosine.masked_fill(column == newest, 0).sum(0)
        return (total / max(len(keys), 1)).softmax(0)


@QUANTITIES.add("group_attention")
@dataclass(frozen=True)
class GroupAttention(Quantity):
    """The importance of a slot in R-KV (2505.24133): for each observing row, the largest logit of the group's query
    heads, then a softmax over all slots but the last protected ones; the mean over rows: [B, Hkv, C]."""

    def measure(self, slots: Slots, observation: Observation) -> torch.Tensor:
        heads, best = slots.kv.stored.len.shape[1], {}
        out = torch.zeros(*slots.n.shape, slots.columns, device=slots.device)
        for part in observation.parts:
            for b, h, x, _ in logits(slots, part):
                at, x = (
                    (b, h * slots.n.shape[1] // heads),
                    x.amax(0)[int(part.skip[b]) :],
                )  # latents (MLA) are chosen once for all heads, as head 0
                best[at] = torch.maximum(best[at], x) if at in best else x
            for (b, g), x in best.items():
                end = int(slots.counts[b, g]) - int(slots.protected[1][b])
                out[b, g, : max(end, 0)] += x[:, : max(end, 0)].softmax(-1).nan_to_num(0).sum(0)
            best.clear()
        return out / observation.row_count[:, None, None].clamp_min(1)
