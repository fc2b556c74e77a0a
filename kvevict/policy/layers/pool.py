from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..checks import count
from ..heads import LOWEST, best, order, winners
from ..inputs import Policy, Slots
from . import LAYERS, LayerBudget


@LAYERS.add("pool")
@dataclass(frozen=True)
class Pool(LayerBudget):
    """One ranking of all slots of all layers and heads: the best C stay (KVzip's non-uniform budget).

    least   slots that every head keeps besides its protected ones, where the budget has that many

    Layers are cut when a chunk's last one was read: the peak is the budget and one chunk in every layer.
    """

    least: int = 4
    pools: ClassVar[bool] = True

    def check(self, policy: Policy) -> None:
        count("least", self.least, 0)

    def keep(self, layers: list[Slots], scores: list[torch.Tensor], wanted: torch.Tensor) -> Sequence[torch.Tensor]:
        heads = [slots.n.shape[1] for slots in layers]
        columns, device = max(slots.columns for slots in layers), wanted.device
        keys = wanted.new_full((len(wanted), sum(heads), columns), LOWEST, dtype=torch.int64)
        for number, (slots, score) in enumerate(zip(layers, scores, strict=True)):
            first = sum(heads[:number])
            key = order(slots, score, first=first, heads=sum(heads))
            keys[:, first : first + heads[number], : key.shape[-1]] = key.to(device)
        protected = torch.cat([slots.least.to(device) for slots in layers], 1)
        wanted = wanted - protected.sum(1)
        mine = best(keys, (wanted // sum(heads)).clamp(0, self.least)) & (keys > LOWEST)
        keep = protected + winners(keys.masked_fill(mine, -LOWEST - 1), wanted)
        return keep.to(torch.int32).split(heads, 1)
