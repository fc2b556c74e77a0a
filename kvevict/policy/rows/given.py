import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from ..inputs import CallRows, LayerRows, Observation, OwnPolicy, PromptCall, PromptRead
from . import ROWS, AppendedRows, Rows


@ROWS.add("given")
@dataclass(frozen=True)
class Given(Rows):
    """Tokens that will follow the prompt, as LookaheadKV's eq. 2 observes with the true response.

    ids   token ids, the same for every row of a batch; they are appended to every chunk, at the positions after the
          prompt, causal among themselves, and are not stored
    """

    ids: tuple[int, ...] = ()
    needs_question: ClassVar[bool] = True

    @property
    def most(self) -> int:
        return len(self.ids)

    decoded = most

    def ready(self, decoder: Any) -> None:
        if not self.ids:
            raise ValueError(
                "rows='given' needs ids=(...), token ids that will follow the prompt (for oracle: the response)"
            )

    def check(self, policy: OwnPolicy) -> None:
        ids = self.ids
        if not isinstance(ids, tuple) or not all(isinstance(i, numbers.Integral) and int(i) >= 0 for i in ids):
            raise ValueError(f"ids must be a tuple of token ids that follow the prompt, got {self.ids!r}")

    def with_response(self, response: Sequence[int]) -> Rows:
        return self if self.ids else Given(tuple(response))

    def appended(self, tokens: int, rows: int, last: bool) -> int:
        return len(self.ids)

    def prepare(self, arguments: PromptCall, read: PromptRead) -> AppendedRows | None:
        if not read.evicts:
            return None
        largest, known = max(self.ids), arguments.decoder.config.vocab_size
        if largest >= known:
            raise ValueError(f"ids hold token id {largest}, and the model knows ids below {known}")
        return after(arguments, read, torch.tensor(self.ids, device=arguments.device).expand(arguments.batch, -1))

    def observe(self, call: LayerRows, past: object) -> Observation:
        return call.appended_rows()

    def observing(self, rows: CallRows) -> np.ndarray:
        return np.full(len(rows.tokens), len(self.ids))


def after(arguments: PromptCall, read: PromptRead, ids: torch.Tensor) -> AppendedRows:
    """Append ids [B, p] at the positions after the prompt."""
    at = arguments.positions()[:, read.prompt - 1 : read.prompt] + 1 + torch.arange(ids.shape[1], device=ids.device)
    return AppendedRows(arguments.embedded(ids), at)
