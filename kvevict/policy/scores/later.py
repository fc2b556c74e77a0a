"""Scores for questions that are asked after the text was read: KVzip's score, measured while a chunk is read again or
predicted by gates, and Compactor's score."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..checks import hold_text
from ..inputs import Needs, Slots, need
from ..rows.repeat import Repeat
from ..rows.window import All
from . import SCORES, Score

BLEND = 0.35  # Compactor's weight of the leverage, one for all budgets, since scores of several chunks compete


@SCORES.add("kvzip")
@dataclass(frozen=True)
class KVzip(Score):
    """KVzip (Kim et al. 2025): a slot's largest attention when its chunk is read again; for later questions.

    sink   number of first slots that are always kept

    The softmax of a repeated row spans the first `sink` slots, the chunk (or part of a whole prompt) that is repeated,
    and the repeated rows up to this one, so that scores of different chunks are comparable.
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

    The score of slot i is the maximum over repeated rows j and query heads h of a_ji ||W_O,h v_i||_2 / ||x_j||_2. Here
    a_ji is the attention weight, W_O,h the columns of the output projection that multiply head h's output, and x_j the
    input of the layer's attention block at row j.
    """

    quantity: ClassVar[str] = "repeated_output"


@SCORES.add("gate")
@dataclass(frozen=True)
class Gate(Score):
    """KVzap's gates (Jegou and Jeblick 2026): KVzip's score, predicted when a token is read; for later questions.

    gates    folder of gates that were trained on this model (`kvevict train --kind gates`); None: the folder that was
             named last for this model, or kvevict_gates in the model's folder
    sink     number of first slots that are always kept
    recent   number of last slots that are always kept
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

    sink     number of first slots that are always kept
    recent   number of last slots that are always kept

    The score is 0.35 times the keys' statistical leverage plus the attention that keys get from the rows of their
    block, earlier and later rows. Both are in standard deviations from their means.
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
