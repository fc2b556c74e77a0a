from dataclasses import dataclass
from typing import ClassVar

from ..checks import count
from . import SCORES, pool
from .snapkv import SnapKV


@SCORES.add("fastkv")
@dataclass(frozen=True)
class FastKV(SnapKV):
    """FastKV (Jo et al. 2025): SnapKV's window pooled per query head, summed over the group; upper layers read fewer.

    tsp       the last decoder layer, from 0, that reads every token; the layers behind it read each chunk's best ones
              (kvevict/engine/propagate.py). "half": floor(L/2) - 1; None: all layers read all tokens
    tsp_len   how many tokens of a chunk those are, its window included
    """

    window: int = 8
    tsp: int | str | None = "half"
    tsp_len: int = 2048
    reduce: ClassVar[str] = "sum"

    def check(self, policy):
        super().check(policy)
        if self.tsp is not None and self.tsp != "half":
            count("tsp", self.tsp, 0)
        count("tsp_len", self.tsp_len, self.window + 1)

    def score(self, view):
        view.heads = view.attention(rows=self.window, reduce="sum", group="none").unflatten(1, (view.n.shape[1], -1))
        return view.heads.sum(2)

    def pooled(self, view, score):
        return sum(pool(head, view, self.kernel, self.pool) for head in view.heads.unbind(2))
