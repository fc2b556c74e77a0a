"""How a layer's slots are split over its heads. One file per idea; the file registers it, and its fields are its
options.

A head budget gets the layer's `Slots`, the numbers that rank them, fp32 [B, Hkv, C], and the layer's total [B]. It
returns each head's slots, int32 [B, Hkv] with that sum, at least the protected ones and at most all it has. run: number
of tokens that are selected together.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..inputs import Slots
from ..registry import Part, Registry, load_folder

HEADS: Registry = Registry("head budget")
LOWEST = torch.iinfo(torch.int64).min


@dataclass(frozen=True)
class HeadBudget(Part):
    ragged: ClassVar[bool] = True  # heads compete, so they end up with different numbers of slots

    def keep(self, slots: Slots, score: torch.Tensor, wanted: torch.Tensor, run: int = 1) -> torch.Tensor:
        raise NotImplementedError

    def reserve(self, slots: Slots, score: torch.Tensor, wanted: torch.Tensor, run: int = 1) -> torch.Tensor:
        """Count the slots that each head must hold, so that `keep` splits the survivors as it would split all slots."""
        return self.keep(slots, score, wanted, run)


def order(slots: Slots, score: torch.Tensor, run: int = 1, first: int = 0, heads: int | None = None) -> torch.Tensor:
    """Rank the slots: int64 [B, Hkv, C], larger is better, no two are equal: score descending, position ascending, head
    ascending (METHODS 8.5), NaN last; runs of a chunked selection stay together. Slots that do not compete, because
    they are protected or not there, are LOWEST. If layers compete: first is the number of this layer's first head
    among all `heads`."""
    bits = (score + 0.0).contiguous().view(torch.int32).long()  # -0 and 0 are equal
    rank = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits).masked_fill(score.isnan(), -(2**31))
    own = slots.n.shape[1]
    heads = own if heads is None else heads
    position, head = slots.positions.long(), first + torch.arange(own, device=slots.device)[:, None]
    place = ((position // run) * heads + head) * run + position % run
    return ((rank << 32) + (2**32 - 1 - place)).masked_fill(~slots.competing, LOWEST)


def best(key: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Mark the keys [B, ..., C] among the wanted[b] largest of their last dimension: bool, as key."""
    counts = wanted.clamp(1, key.shape[-1]).tolist()
    # Not kthvalue: on a GPU it searches a row with one block.
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


load_folder(__name__)
