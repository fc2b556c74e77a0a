import numbers
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from . import ROWS, AppendedRows, Part, Rows, at_most


@ROWS.add("repeat")
@dataclass(frozen=True)
class Repeat(Rows):
    """KVzip's rows (Kim et al. 2025): after every chunk its own tokens are read again, and observe.

    instruction   token ids between the chunk and its repetition, which do not observe

    [instruction | the chunk's tokens] are appended at the positions right after the chunk, causal, and are not stored.
    Without a chunk_size that is the prompt, read twice. A repetition attends to its own chunk, so its attention to
    slots of earlier chunks says little of their worth: carry="keep" keeps what their own repetition gave them.
    """

    instruction: tuple = ()
    newest: ClassVar[bool] = True
    most: ClassVar[int] = 2**31 - 1

    def check(self, policy):
        ids = self.instruction
        if not isinstance(ids, tuple) or not all(isinstance(i, numbers.Integral) and i >= 0 for i in ids):
            raise ValueError(f"instruction must be a tuple of token ids, or () for none, got {ids!r}")

    def appended(self, tokens, rows, last):
        return len(self.instruction) + rows

    def prepare(self, request, read):
        largest, known = max(self.instruction, default=0), request.decoder.config.vocab_size
        if largest >= known:
            raise ValueError(f"instruction holds token id {largest}, and the model knows ids below {known}")

    def rows_for(self, chunk, request, read):
        """A row's padding comes after its repetition, where no token sees it."""
        padding = (request.first.long() - chunk.start).clamp(0, chunk.rows)[:, None]
        columns = chunk.start + padding + torch.arange(chunk.rows, device=request.device)
        columns = columns.clamp_max(chunk.end - 1)
        again = request.tokens_at(columns)
        if not self.instruction:
            return AppendedRows(again, None, columns)
        ids = torch.tensor(self.instruction, device=request.device).expand(request.batch, -1)
        return AppendedRows(torch.cat([request.embedded(ids), again], 1), None)

    def observe(self, call, past):
        return call.appended_rows(count=call.columns, padded=True)

    def observing(self, step):
        return at_most(1, step) if step.read is None else np.maximum(step.chunk.rows - step.padding, 0)

    def parts(self, rows, stored, appended, tokens):
        return [Part(rows, stored + rows, False, True)]
