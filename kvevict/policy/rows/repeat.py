import numbers
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from ...models import families
from ..checks import count
from ..inputs import CallRows, Chunk, LayerRows, Observation, Policy
from . import ROWS, AppendedRows, Rows


@ROWS.add("repeat")
@dataclass(frozen=True)
class Repeat(Rows):
    """KVzip's rows (Kim et al. 2025): tokens are read again after they were read, and observe.

    instruction   token ids between a chunk and its repetition; they observe too; or their text, if the tokenizer
                  is at hand (`kvevict.read`, `answer`, `Pipeline`, commands that answer)
    part          tokens per part when schedule="prompt" repeats a prompt; scores that are not the largest number
                  over rows repeat it in one part

    schedule="chunk": [instruction | the chunk's tokens] are read at the positions right after each chunk, causal, and
    are not stored. A repetition attends to its own chunk, so its attention to slots of earlier chunks says little of
    their worth: carry="keep" keeps the scores from when they were repeated. schedule="prompt", KVzip itself: the whole
    prompt is read, in chunks if there is a chunk_size, then each part is repeated after it, and one cut follows.
    """

    instruction: tuple[int, ...] | str = ()
    part: int = 2048
    most: ClassVar[None] = None
    newest: ClassVar[bool] = True
    repeats: ClassVar[bool] = True

    def check(self, policy: Policy) -> None:
        ids = self.instruction
        valid = isinstance(ids, tuple) and all(isinstance(i, numbers.Integral) and int(i) >= 0 for i in ids)
        if not valid and not isinstance(ids, str):
            raise ValueError(f"instruction must be a tuple of token ids or a text, or () for none, got {ids!r}")
        count("part", self.part, 1)

    def ready(self, decoder: Any) -> None:
        if isinstance(self.instruction, str):
            raise ValueError(
                "instruction is a text, and there is no tokenizer here, as kvevict.read, answer and Pipeline have one: "
                "pass its token ids, instruction=tuple(tokenizer(text, add_special_tokens=False).input_ids)"
            )

    def appended(self, tokens: int, rows: int, last: bool) -> int:
        return len(self.instruction) + rows

    def prepare(self, arguments: Any, read: Any) -> Any:
        largest, known = max(self.instruction, default=0), arguments.decoder.config.vocab_size
        if largest >= known:
            raise ValueError(f"instruction holds token id {largest}, and the model knows ids below {known}")
        self._check_room(arguments, read)

    def _check_room(self, arguments: Any, read: Any) -> None:
        """Raise ValueError if a prompt is within the model's positions, and its repetition is not."""
        policy, seen = arguments.policy, max(read.seen)
        longest = min(policy.chunk_size or read.prompt, read.prompt)
        if policy.schedule == "prompt":
            longest = min(self.part if policy.score.largest else read.prompt, max(read.tokens))
        context = families.context_of(arguments.decoder.config)
        if not read.evicts or context is None or seen > context:
            return
        room = context - seen
        if self.appended(0, longest, True) > room:
            size = "part" if policy.schedule == "prompt" else "chunk_size"
            raise ValueError(
                f"{seen} tokens and the {self.appended(0, longest, True)} rows that repeat the last of them end after "
                f"the model's {context} positions: {room} are left to repeat with, so give a {size} of at most "
                f"{max(room - len(self.instruction), 0)}, or a shorter prompt"
            )

    def rows_for(self, chunk: Chunk, arguments: Any, read: Any) -> AppendedRows:
        """Repeat each row's tokens. A row with fewer tokens has rows after its repetition that no token sees."""
        first, again = arguments.first.long(), chunk.again
        begin = first.clamp(chunk.start, chunk.end) if again is None else first + again.start
        number = torch.arange(chunk.appended - len(self.instruction), device=begin.device)
        columns = (begin[:, None] + number).clamp_max(chunk.end - 1)
        rows, after = arguments.tokens_at(columns), None
        if again is not None:
            last = arguments.positions()[:, read.prompt - 1 : read.prompt]
            after = last + 1 + torch.arange(chunk.appended, device=arguments.device)
        if not self.instruction:
            return AppendedRows(rows, after, columns)
        ids = torch.tensor(self.instruction, device=arguments.device).expand(arguments.batch, -1)
        return AppendedRows(torch.cat([arguments.embedded(ids), rows], 1), after)

    def observe(self, call: LayerRows, past: Any) -> Observation:
        return call.repeated_rows(self.observing(call.rows))

    def observing(self, rows: CallRows) -> Any:
        """Count the repeated rows: int [B], 0 for a batch row without tokens in this chunk."""
        if rows.read is None:
            return np.minimum(1, rows.tokens)
        tokens, again = rows.tokens - rows.appended, rows.again
        if again is not None:
            tokens = np.minimum(rows.read.tokens - again.start, len(again))
        return np.where(tokens > 0, len(self.instruction) + tokens, 0)
