"""Scores for questions that come later: KVzip's, measured as a chunk is read again or predicted by gates, and
Compactor's."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..checks import hold_text
from ..inputs import Needs, Slots, need
from ..rows.repeat import Repeat
from ..rows.window import All
from . import SCORES, Score

BLEND = 0.35  # Compactor's weight of the leverage, for any budget, since scores of several chunks compete


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
    def needs(self) -> Needs:
        return (need(self.quantity, sink=self.sink),)


@SCORES.add("kvzip+")
@dataclass(frozen=True)
class KVzipPlus(KVzip):
    """KVzip+ (Jegou and Jeblick 2026): KVzip's attention, weighted by the slot's contribution to the row.

    With W_O,h the columns of the output projection that query head h feeds and x_j the input of the layer's attention
    block at repeated row j: max over j and h of a_ji ||W_O,h v_i||_2 / ||x_j||_2.
    """

    quantity: ClassVar[str] = "repeated_output"


@SCORES.add("gate")
@dataclass(frozen=True)
class Gate(Score):
    """KVzap's gates (Jegou and Jeblick 2026): KVzip's number of a token, expected as it is read; for later questions.

    gates    folder of gates that were trained on this model (`kvevict train --kind gates`); None: those named
             last for this model, or kvevict_gates in its folder
    sink     first slots that are always kept
    recent   last slots that are always kept
    """

    gates: object = None
    sink: int = 4
    recent: int = 64
    carry: ClassVar[str] = "keep"
    comparable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        hold_text(self, "gates", "the folder that `kvevict train --kind gates` wrote")

    @property
    def needs(self) -> Needs:
        return (need("gate", gates=self.gates),)


@SCORES.add("compactor")
@dataclass(frozen=True)
class Compactor(Score):
    """Compactor (Chari & Van Durme 2025): outlying keys, and attention both ways in blocks; for later questions.

    sink     first slots that are always kept
    recent   last slots that are always kept

    The score is 0.35 times the keys' statistical leverage plus the attention, both in standard deviations.
    """

    sink: int = 8
    recent: int = 4
    rows: ClassVar = All()
    carry: ClassVar[str] = "keep"
    ordinal: ClassVar[bool] = True

    @property
    def needs(self) -> Needs:
        ends = dict(sink=self.sink, recent=self.recent)
        return need("leverage", **ends), need("block_attention", **ends)

    def score(self, slots: Slots, leverage: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
        return BLEND * leverage + attention
