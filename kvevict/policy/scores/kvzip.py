from dataclasses import dataclass
from typing import Any, ClassVar

from ..inputs import need
from ..rows.repeat import Repeat
from . import SCORES, Score


@SCORES.add("kvzip")
@dataclass(frozen=True)
class KVzip(Score):
    """KVzip (Kim et al. 2025): a slot's largest attention when its chunk is read again; for later questions.

    sink   first slots that are always kept

    The softmax of a repeated row spans those first slots, the chunk (or the part of a whole prompt) and the repetition
    itself, so that numbers of different chunks compare.
    """

    sink: int = 4
    rows: ClassVar = Repeat()
    carry: ClassVar[str] = "keep"
    comparable: ClassVar[bool] = True
    largest: ClassVar[bool] = True
    quantity: ClassVar[str] = "repetition"

    @property
    def needs(self) -> tuple[Any, ...]:
        return (need(self.quantity, sink=self.sink),)


@SCORES.add("kvzip+")
@dataclass(frozen=True)
class KVzipPlus(KVzip):
    """KVzip+ (Jegou and Jeblick 2026): KVzip's attention, weighted by the slot's contribution to the row.

    With W_O,h the columns of the output projection that query head h feeds and x_j the input of the layer's attention
    block at repeated row j: max over j and h of a_ji ||W_O,h v_i||_2 / ||x_j||_2.
    """

    quantity: ClassVar[str] = "repeated_output"
