from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from ...models import families
from ..checks import count
from ..inputs import CallRows, Chunk, LayerRows, Observation, OwnPolicy, PromptCall, PromptRead
from . import ROWS, AppendedRows, Rows


@ROWS.add("repeat")
@dataclass(frozen=True)
class Repeat(Rows):
    """KVzip's rows (Kim et al. 2025): tokens are read again after they were read, and observe.

    part   tokens per part when schedule="prompt" repeats a prompt; scores that are not the largest number over rows
           repeat it in one part

    schedule="chunk": the chunk's tokens are read at the positions right after each chunk, causal, and are not stored. A
    repetition attends to its own chunk, so its attention to slots of earlier chunks says little of their worth:
    carry="keep" keeps the scores from when they were repeated. schedule="prompt", KVzip itself: the whole prompt is
    read, in chunks if there is a chunk_size, then each part is repeated after it, and one cut follows.
    """

    part: int = 2048
    most: ClassVar[None] = None
    newest: ClassVar[bool] = True
    repeats: ClassVar[bool] = True

    def check(self, policy: OwnPolicy) -> None:
        count("part", self.part, 1)

    def appended(self, tokens: int, rows: int, last: bool) -> int:
        return rows

    def prepare(self, arguments: PromptCall, read: PromptRead) -> None:
        """Raise ValueError if a prompt is within the model's positions, and its repetition is not."""
        policy, seen = arguments.policy, max(read.seen)
        longest = min(policy.chunk_size or read.prompt, read.prompt)
        if policy.schedule == "prompt":
            longest = min(self.part if policy.score.largest else read.prompt, max(read.tokens))
        context = families.context_of(arguments.decoder.config)
        if read.evicts and context is not None and seen <= context < seen + longest:
            size = "part" if policy.schedule == "prompt" else "chunk_size"
            raise ValueError(
                f"{seen} tokens and the {longest} rows that repeat the last of them end after the model's {context} "
                f"positions: {context - seen} are left to repeat with, so give a {size} of at most {context - seen}, "
                "or a shorter prompt"
            )

    def rows_for(self, chunk: Chunk, arguments: PromptCall, read: PromptRead) -> AppendedRows:
        """Repeat each batch row's tokens. One with fewer tokens has rows after its repetition that no token sees."""
        first, again = arguments.first.long(), chunk.again
        begin = first.clamp(chunk.start, chunk.end) if again is None else first + again.start
        number = torch.arange(chunk.appended, device=begin.device)
        columns = (begin[:, None] + number).clamp_max(chunk.end - 1)
        after = None if again is None else arguments.positions()[:, read.prompt - 1 : read.prompt] + 1 + number
        return AppendedRows(arguments.tokens_at(columns), after, columns)

    def observe(self, call: LayerRows, past: object) -> Observation:
        return call.repeated_rows(self.observing(call.rows))

    def observing(self, rows: CallRows) -> np.ndarray:
        """Count the repeated rows: int [B], 0 for a batch row without tokens in this chunk."""
        if rows.read is None:
            return np.minimum(1, rows.tokens)
        if rows.again is not None:
            return np.minimum(rows.read.tokens - rows.again.start, len(rows.again)).clip(0)
        return (rows.tokens - rows.appended).clip(0)
