from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..apportion import apportion
from ..inputs import Slots
from . import HEADS, HeadBudget


@HEADS.add("equal")
@dataclass(frozen=True)
class Equal(HeadBudget):
    """Every head gets the same, its prompt's slots aside where those stay; the remainder goes to lower heads."""

    ragged: ClassVar[bool] = False

    def keep(self, slots: Slots, score: torch.Tensor, wanted: torch.Tensor, run: int = 1) -> torch.Tensor:
        n, least, heads = slots.n - slots.past, slots.least - slots.past, slots.n.shape[1]
        wanted = wanted - slots.past.sum(1)
        keep = shares(wanted, torch.arange(heads, device=n.device))
        if bool(((keep > n) | (keep < least)).any()):
            keep = apportion(torch.ones_like(n), wanted, least, n)
        return (slots.past + keep).to(torch.int32)


def shares(slots: Any, heads: Any) -> Any:
    """Split slots [B] of a layer equally over the heads 0 .. H - 1, the remainder to lower ones: int [B, H]. Both are
    tensors, or NumPy's on the host."""
    return slots[:, None] // len(heads) + (heads < (slots % len(heads))[:, None])
