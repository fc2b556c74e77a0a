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
    """KVzip's rows (Kim et al. 2025): tokens are read a second time, and the repeated rows observe.

    part   number of tokens in each part of a prompt that schedule="prompt" repeats part by part. Only scores that are
           a maximum over rows can be computed by parts; for other scores the prompt is one part

    With schedule="chunk", a chunk's tokens are read again at the positions right after the chunk, causally, and are not
    stored. Repeated rows attend to the tokens that they repeat, so their attention says little about slots of earlier
    chunks: carry="keep" keeps the score that a slot got when its own chunk was repeated. With schedule="prompt" (KVzip
    itself), the whole prompt is read, in chunks if there is a chunk_size; then each part is repeated after the prompt,
    and one cut follows.
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
        """Raise ValueError if the prompt fits the model's positions, but the rows that repeat it do not."""
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
        """Return rows that repeat the tokens of each batch row. If a batch row has fewer tokens than others, extra rows
        follow its repetition; no token attends to these."""
        first, again = arguments.first.long(), chunk.again
        begin = first.clamp(chunk.start, chunk.end) if again is None else first + again.start
        number = torch.arange(chunk.appended, device=begin.device)
        columns = (begin[:, None] + number).clamp_max(chunk.end - 1)
        after = None if again is None else arguments.positions()[:, read.prompt - 1 : read.prompt] + 1 + number
        return AppendedRows(arguments.tokens_at(columns), after, columns)

    def observe(self, call: LayerRows, past: object) -> Observation:
        return call.repeated_rows(self.observing(call.rows))

    def observing(self, rows: CallRows) -> np.ndarray:
        """Return the number of repeated rows that observe: int [B], 0 for a batch row without tokens in this chunk."""
        if rows.read is None:
            return np.minimum(1, rows.tokens)
        if rows.again is not None:
            return np.minimum(rows.read.tokens - rows.again.start, len(rows.again)).clip(0)
        return (rows.tokens - rows.appended).clip(0)
