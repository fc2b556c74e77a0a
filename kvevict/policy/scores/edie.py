from dataclasses import dataclass
from typing import ClassVar

from ..checks import at_least_0, one_of
from ..inputs import Needs, OwnPolicy, need
from . import SCORES, Pooled

WEIGHTS = ("middle", "none", "all", "i<=t-2w", "i>w")


@SCORES.add("edie")
@dataclass(frozen=True)
class Edie(Pooled):
    """EDIE (eq. 9-11): how far removing a slot may move the observers' outputs in the 1-norm; a bound where alpha is 0.

    alpha    keeps the denominator 1 + alpha - a from vanishing (table 2: 0.05, 0.1, 0.2)
    weight   c_j, the largest attention of row j over the slots at positions w <= i < T - 2w ("middle"), over all
             ("all"), over i < T - 2w ("i<=t-2w"), over w <= i ("i>w"), or 1 ("none") (table 3); w is the number of
             observers
    """

    alpha: float = 0.1
    weight: str = "middle"
    kind: ClassVar[str] = "edie"

    def check(self, policy: OwnPolicy) -> None:
        super().check(policy)
        one_of("weight", self.weight, WEIGHTS)
        at_least_0("alpha", self.alpha)

    @property
    def needs(self) -> Needs:
        return (need("output_error", kind=self.kind, alpha=self.alpha, weight=self.weight),)


@SCORES.add("edie-exact")
@dataclass(frozen=True)
class EdieExact(Edie):
    """EDIE without its triangle inequality (eq. 7): the exact 1-norm error of removing one slot, weighted by row."""

    alpha: ClassVar[float] = 0.0
    kind: ClassVar[str] = "l1"
