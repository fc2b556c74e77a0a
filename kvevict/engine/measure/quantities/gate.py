from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ....policy.inputs import Observation, Slots, need
from .. import gates
from . import QUANTITIES, Quantity


@QUANTITIES.add("gate")
@dataclass(frozen=True)
class Gate(Quantity):
    """The slots' worth as predicted by trained gates (KVzap, Jegou and Jeblick 2026): [B, Hkv, C].

    A token has its numbers from the moment that it is read, and its slots carry them (carry="keep"). Slots stored
    earlier get the mean of the head's new numbers. It is used only if a slot carries no number.
    """

    gates: str | None = None
    observes: ClassVar[bool] = False
    of_tokens: ClassVar[bool] = True

    @property
    def needs(self) -> tuple[Any, ...]:
        return "hidden", need("gates", folder=self.gates)

    def ready(self, decoder: Any, modules: Any) -> None:
        gates.loaded(self.gates, decoder, anew=True)

    def tokens(self, hidden: torch.Tensor, numbers_of: Any) -> torch.Tensor:
        return numbers_of(hidden)

    def measure(self, slots: Slots, observation: Observation, hidden: torch.Tensor, numbers_of: Any) -> torch.Tensor:
        kv, new = slots.kv, slots.kv.k.shape[2]
        if not new:
            return torch.ones(*slots.n.shape, slots.columns, device=slots.device)
        # The new column of each alive slot; less than the row's padding for slots stored before.
        columns = torch.arange(slots.columns, device=slots.device) + (new - slots.n[..., None]).long()
        numbers = numbers_of(hidden[:, :new])
        padding = torch.arange(new, device=slots.device) < kv.first[:, None, None]
        mean = numbers.masked_fill(padding, 0).sum(2, keepdim=True) / (new - kv.first).clamp_min(1)[:, None, None]
        placed = numbers.gather(2, columns.clamp(0, new - 1))
        return torch.where(columns >= kv.first[:, None, None], placed, mean)
