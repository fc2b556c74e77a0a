from dataclasses import dataclass
from typing import ClassVar

from ..checks import flag, one_of
from ..needs import need
from . import REFINEMENTS, Refinement


@REFINEMENTS.add("caote")
@dataclass(frozen=True)
class Caote(Refinement):
    """CAOTE (eq. 6): how far a head's attention output moves when a slot is removed, the scores taken as weights.

    weights    "pooled" normalises the score, summed over rows and pooled, to one set of weights; "each" takes the
               exact error of every observing row and query head, summed over rows, mean over the group (not pooled)
    squared    the squared distance of eq. 7
    protect    False: the score's window, sinks and recent slots compete too, as in the paper
    """

    weights: str = "pooled"
    squared: bool = False
    protect: bool = True
    fast: ClassVar[bool] = False
    refines: ClassVar[bool] = True

    @property
    def needs(self):
        return (need("output_error", kind="l2", group="mean"),) if self.weights == "each" else ()

    def check(self, policy):
        one_of("weights", self.weights, ("pooled", "each"))
        for name in ("squared", "protect"):
            flag(name, getattr(self, name))
        if self.weights == "each" and (self.squared or self.fast):
            raise ValueError(
                "weights='each' is the exact error: it has no squared form and no fast one; weights='pooled'"
            )

    def scans(self):
        return 0 if self.weights == "each" else 2  # the mean value, and distances from it

    def flops(self):
        return 0 if self.weights == "each" else 4 if self.fast else 5  # weighted or not, summed; less, squared, summed

    def refine(self, slots, score, *each):
        return each[0] if each else slots.removal_error(score, self.fast, self.squared)


@REFINEMENTS.add("fastcaote")
@dataclass(frozen=True)
class FastCaote(Caote):
    """FastCAOTE (eq. 8): CAOTE with the plain mean value in place of the weighted one."""

    fast: ClassVar[bool] = True
