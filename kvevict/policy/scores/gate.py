from dataclasses import dataclass
from typing import Any, ClassVar

from ..checks import count, hold_text
from ..inputs import Policy, need
from . import SCORES, Score


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
    def protected(self) -> Any:
        return self.sink, self.recent

    def check(self, policy: Policy) -> None:
        super().check(policy)
        count("recent", self.recent, 0)

    @property
    def needs(self) -> tuple[Any, ...]:
        return (need("gate", gates=self.gates),)
