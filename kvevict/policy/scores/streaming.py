from dataclasses import dataclass
from typing import ClassVar

import torch

from ..checks import count, flag
from . import SCORES, Score


@SCORES.add("streaming")
@dataclass(frozen=True)
class Streaming(Score):
    """StreamingLLM (Xiao et al. 2023): the first `sink` slots, then the most recent ones.

    rerotate   False: distances are those of the text, as other eviction libraries have it. True: distances count slots,
               as in the paper, so that none exceeds budget and chunk (kvevict/engine/rerotate.py); `kvevict.report` gives the
               positions in the text all the same
    """

    sink: int = 4
    rerotate: bool = False
    decodes: ClassVar[bool] = True
    interval: ClassVar[int] = 1
    ordinal: ClassVar[bool] = True

    def protect(self, view):
        return self.sink, 0

    def smallest_budget(self):
        return self.sink + 1

    def check(self, policy):
        count("sink", self.sink, 0)
        flag("rerotate", self.rerotate)

    def score(self, view):
        return torch.arange(view.columns, dtype=torch.float32, device=view.device).expand(*view.n.shape, -1)
