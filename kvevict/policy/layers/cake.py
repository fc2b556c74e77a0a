from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..inputs import Policy, Slots, need
from . import LAYERS, LayerBudget


@LAYERS.add("cake")
@dataclass(frozen=True)
class Cake(LayerBudget):
    """CAKE (Qin et al. 2025): slots beyond the window in proportion to P = H * V, in a cascade.

    a is the attention of the score's window to the slots that are not protected, in the chunk being read. H is
    -sum a ln a over query heads, rows and slots; V is the sum over query heads and slots of the sample variance over
    rows. A batch row from which nothing was evicted yet has no measurement and splits uniformly.
    """

    beyond: ClassVar[bool] = True
    cascades: ClassVar[bool] = True
    needs: ClassVar[tuple[Any, ...]] = (need("attention", reduce="sum", group="sum", term="entropy"), "moments")

    def shares(self, policy: Policy, layers: int, tokens: int, measured: Any = None) -> list[float]:
        return measured or [1.0] * layers

    def preference(self, slots: Slots, entropy: torch.Tensor, moments: tuple[torch.Tensor, ...]) -> torch.Tensor:
        protected = ~slots.competing
        entropy = entropy.masked_fill(protected, 0)
        variance = moments[1].unflatten(1, (protected.shape[1], -1)).masked_fill(protected[:, :, None], 0)
        spread = slots.heads.sum(entropy.double().sum((1, 2))).clamp_min(0)
        shift = slots.heads.sum(variance.double().sum((1, 2, 3)))
        return spread * shift
