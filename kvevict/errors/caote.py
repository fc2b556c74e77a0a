from dataclasses import dataclass
from typing import ClassVar

from ..checks import one_of
from . import ERRORS, Refinement


@ERRORS.add("caote")
@dataclass(frozen=True)
class Caote(Refinement):
    """CAOTE (eq. 6): how far a head's attention output moves when a slot is removed, the scores taken as weights.

    each       "pooled" normalises the score, summed over rows and pooled, to one set of weights; "row" takes the exact
               error of every observing row and query head, summed over rows, mean over the group (attention scores
               of a window or of the last row only)
    squared    the squared distance of eq. 7
    protect    False: the score's window, sinks and recent slots compete too, as in the paper
    """

    each: str = "pooled"
    squared: bool = False
    protect: bool = True
    fast: ClassVar[bool] = False
    refines: ClassVar[bool] = True

    @property
    def outputs(self):
        return self.each == "row"

    def check(self, policy):
        one_of("each", self.each, ("pooled", "row"))
        for name in ("squared", "protect"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.each == "row" and (self.squared or self.fast):
            raise ValueError("each='row' is the exact error: it has no squared form and no fast one; each='pooled'")

    def refine(self, view, score):
        if self.each == "row":
            return view.output_error(view.policy.score.rows or 1, "l2", group="mean")
        return view.refine(score.contiguous(), self.fast, self.squared)


@ERRORS.add("fastcaote")
@dataclass(frozen=True)
class FastCaote(Caote):
    """FastCAOTE (eq. 8): CAOTE with the plain mean value in place of the weighted one."""

    fast: ClassVar[bool] = True
