import numbers
from dataclasses import dataclass
from typing import ClassVar

import torch

from . import SCORES, Score, check_pool, pool


@SCORES.add("oracle")
@dataclass(frozen=True)
class Oracle(Score):
    """The true response's attention to the prompt (LookaheadKV eq. 2): an upper bound, since it needs the response.

    response   token ids that will follow the prompt, the same for every row; they read along behind every chunk, at the
               positions behind the prompt, and are not stored
    """

    response: tuple = ()
    kernel: int = 7
    pool: str = "max"
    behind: ClassVar[bool] = True

    @property
    def length(self):
        return len(self.response)

    def ready(self):
        if not self.response:
            raise ValueError("oracle needs the response: response=(...), token ids that will follow the prompt")

    def check(self, policy):
        ids = self.response
        if not isinstance(ids, tuple) or not all(isinstance(i, numbers.Integral) and i >= 0 for i in ids):
            raise ValueError(f"response must be a tuple of token ids that follow the prompt, got {ids!r}")
        if policy.decode:
            raise ValueError("oracle scores with a response known before decoding: pass decode=False")
        check_pool(self.kernel, self.pool)

    def prepare(self, call, prompt):
        largest, known = max(self.response), call.decoder.config.vocab_size
        if largest >= known:
            raise ValueError(f"response holds token id {largest}, and the model knows ids below {known}")
        return torch.tensor(self.response, device=call.device).expand(call.batch, -1)

    def score(self, view):
        return view.appended_attention("mean")

    def pooled(self, view, score):
        return pool(score, view, self.kernel, self.pool)
