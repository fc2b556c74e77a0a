from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from ....policy.inputs import Need, Observation, Slots, need
from .. import gates
from . import QUANTITIES, Quantity

# `Gates.numbers` of a layer: input of its attention block [B, T, E] -> scores of the tokens, fp32 [B, Hkv, T]
NumbersOf = Callable[[torch.Tensor], torch.Tensor]


@QUANTITIES.add("gate")
@dataclass(frozen=True)
class GateOutput(Quantity):
    """The scores that trained gates predict for the new slots (KVzap, Jegou and Jeblick 2026): [B, Hkv, C].

    Stored slots carry the scores that they got when their tokens were read (carry="keep"). Here they get the mean of
    the new slots' scores in their head, which is used only for a stored slot that carries no score.
    """

    gates: str | None = None
    observes: ClassVar[bool] = False
    of_tokens: ClassVar[bool] = True

    @property
    def needs(self) -> tuple[str | Need, ...]:
        return "hidden", need("gates", folder=self.gates)

    def ready(self, decoder: torch.nn.Module, modules: list[torch.nn.Module]) -> None:
        gates.loaded(self.gates, decoder, anew=True)

    def tokens(self, hidden: torch.Tensor, numbers_of: NumbersOf) -> torch.Tensor:
        return numbers_of(hidden)

    def measure(
        self, slots: Slots, observation: Observation, hidden: torch.Tensor, numbers_of: NumbersOf
    ) -> torch.Tensor:
        kv, new = slots.kv, slots.kv.k.shape[2]
        if not new:
            return torch.ones(*slots.n.shape, slots.columns, device=slots.device)
        # Each alive slot's column among the new ones; for stored slots it is below kv.first, the row's padding.
        columns = torch.arange(slots.columns, device=slots.device) + (new - slots.n[..., None]).long()
        numbers = numbers_of(hidden[:, :new])
        padding = torch.arange(new, device=slots.device) < kv.first[:, None, None]
        mean = numbers.masked_fill(padding, 0).sum(2, keepdim=True) / (new - kv.first).clamp_min(1)[:, None, None]
        placed = numbers.gather(2, columns.clamp(0, new - 1))
        return torch.where(columns >= kv.first[:, None, None], placed, mean)
