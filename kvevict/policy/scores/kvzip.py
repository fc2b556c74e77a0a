from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..checks import one_of
from ..inputs import Policy, Slots, need
from ..rows.repeat import Repeat
from . import SCORES, Score

SUPPORTS = ("chunk", "all")


@SCORES.add("kvzip")
@dataclass(frozen=True)
class KVzip(Score):
    """KVzip (Kim et al. 2025): the largest attention that a slot gets when its chunk is read again; question unknown.

    sink      first slots that are always kept
    support   slots in a repeated row's softmax: "chunk", those first slots, the chunk (or the part of a whole prompt)
              and the repetition itself, so that numbers of different chunks compare; "all", all that it sees
    """

    sink: int = 4
    support: str = "chunk"
    rows: ClassVar = Repeat()
    carry: ClassVar[str] = "keep"
    comparable: ClassVar[bool] = True
    largest: ClassVar[bool] = True

    def check(self, policy: Policy) -> None:
        super().check(policy)
        one_of("support", self.support, SUPPORTS)

    @property
    def needs(self) -> tuple[Any, ...]:
        if self.support == "chunk":
            return (need("repetition", sink=self.sink),)
        return (need("attention", reduce="max", group="max"),)

    def score(self, slots: Slots, attention: torch.Tensor) -> torch.Tensor:
        return attention


@SCORES.add("kvzip+")
@dataclass(frozen=True)
class KVzipPlus(KVzip):
    """KVzip+ (Jegou and Jeblick 2026): KVzip's attention, weighted by the slot's contribution to the row.

    With W_O,h the columns of the output projection that query head h feeds and x_j the input of the layer's attention
    block at repeated row j: max over j and h of a_ji ||W_O,h v_i||_2 / ||x_j||_2.
    """

    @property
    def needs(self) -> tuple[Any, ...]:
        return (need("repeated_output", sink=self.sink, support=self.support),)
