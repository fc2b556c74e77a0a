from dataclasses import dataclass
from typing import ClassVar

import torch

from ..checks import at_least_0, one_of
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
    outputs: ClassVar[bool] = True
    kind: ClassVar[str] = "edie"

    def passes(self, known=False):
        return 1 if self.weight == "none" else 2

    def scans(self):
        return 1

    def check(self, policy):
        super().check(policy)
        one_of("weight", self.weight, WEIGHTS)
        at_least_0("alpha", self.alpha)

    def score(self, view):
        return view.output_error(self.kind, self.row_weights(view), self.alpha)

    def row_weights(self, view):
        """c_j [B, H, R], or None for 1. A head without a slot in the range takes the slots outside the window; 1 when
        there is none either."""
        if self.weight == "none":
            return None
        rows = view.row_count[:, None]
        position, n = view.positions(), view.n
        alive = position >= 0
        before = lambda stop: (alive & (position < stop[..., None])).sum(-1)  # noqa: E731  slots at earlier positions
        end = position.amax(-1).amax(-1, keepdim=True) + 1  # T
        zero, outside = torch.zeros_like(n), before(end - rows)
        lo = before(rows.expand_as(n)) if self.weight in ("middle", "i>w") else zero
        hi = before((end - 2 * rows).expand_as(n)) if self.weight in ("middle", "i<=t-2w") else n
        empty = hi <= lo
        lo, hi = torch.where(empty, zero, lo), torch.where(empty, outside, hi)
        peak = view.peak(lo.to(torch.int32), hi.to(torch.int32))
        none = (hi <= lo).repeat_interleave(peak.shape[1] // n.shape[1], 1)
        return peak.masked_fill(none[..., None], 1.0)


@SCORES.add("edie-exact")
@dataclass(frozen=True)
class EdieExact(Edie):
    """EDIE without its triangle inequality (eq. 7): the exact 1-norm error of removing one slot, weighted by row."""

    alpha: ClassVar[float] = 0.0
    kind: ClassVar[str] = "l1"
