"""The queries that observe (METHODS section 1a). One file per idea; the file registers it, and its fields are its
options.

A `Rows` chooses the rows appended to a chunk (read with it, not stored), the queries that observe a layer's slots, and
which slots of these queries stay. A score turns their attention into numbers; every score works with all rows, with the
exceptions in `rules.py`. While decoding nothing is appended: the newest row observes, or the last `decoded` ones.
"""

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from ..inputs import CallRows, Chunk, LayerRows, Observation, PromptCall, PromptRead
from ..registry import Part, Registry, load_folder
from ..seen.slots import FREE, Bounds

ROWS: Registry = Registry("rows")


@dataclass(frozen=True, eq=False)
class AppendedRows:
    """Rows that are read with a chunk, after it, and are not stored."""

    tokens: torch.Tensor  # ids [B, p] or embeddings [B, p, E]
    positions: torch.Tensor | None  # [B, p] in the prompt or after it; None: right after the chunk
    columns: torch.Tensor | None = None  # [B, p] their columns in the prompt; None: they are not of the prompt
    adapter: Any = None  # its `on(decoder)` is entered while the rows are read
    unseen: Any = None  # int32 [B, 2] positions (start, stop) that they do not see; None: they see all

    def last(self, count: int) -> "AppendedRows":
        """Return the last `count` rows."""
        positions, columns = (None if t is None else t[:, -count:] for t in (self.positions, self.columns))
        return replace(self, tokens=self.tokens[:, -count:], positions=positions, columns=columns)

    def adapted(self, decoder: Any) -> AbstractContextManager[Any]:
        """Return the context manager in which the decoder reads the rows."""
        return contextlib.nullcontext() if self.adapter is None else self.adapter.on(decoder)


class Question(NamedTuple):
    """The question of a batch row, in tokens counted from the row's first."""

    spans: tuple[tuple[int, int], ...]  # (start, stop) of the tokens that observe
    # token counts from each place where the request may begin to the prompt's end; (): there is no request
    request: tuple[int, ...] = ()
    before: tuple[int, int, bool] | None = None  # the question before the text: start, stop, whether nothing repeats it
    near: bool = False  # the question is near the prompt's end and observes where it stands
    last: bool = False  # no question was found: the prompt's last rows observe, as those of the policy


@dataclass(frozen=True)
class Rows(Part):
    needs_full_prompt: ClassVar[bool] = False  # the rows exist once all of the prompt was read, so layers wait for that
    rotates: ClassVar[bool] = False  # rotates queries from one position to another: `LayerRows.rotate`
    supports_tensor_parallel: ClassVar[bool] = True  # a rank's part of a model is enough
    newest: ClassVar[bool] = False  # while decoding the newest row observes, and none is remembered
    repeats: ClassVar[bool] = False  # reads tokens a second time; with a single cut at the end, the whole prompt
    n_d: ClassVar[int] = 0  # tokens that are drafted

    @property
    def most(self) -> int | None:
        """The largest number of observing rows; None: no limit."""
        raise NotImplementedError

    @property
    def protected(self) -> int:
        """The largest number of slots that `protect` keeps."""
        return 0

    @property
    def at_the_end(self) -> bool:
        """Whether the prompt's last tokens observe because a question is expected there. A question found elsewhere
        takes their place."""
        return False

    @property
    def needs_question(self) -> bool:
        """Whether the prompt's last rows alone observe, so that its question must be there, or be named."""
        return bool(self.decoded)

    @property
    def decoded(self) -> int:
        """The number of decoded rows that are remembered to observe while decoding."""
        return 0

    def ready(self, decoder: Any) -> None:
        """Raise ValueError when an option without a default is missing, or does not fit this decoder; called when a
        model is patched."""

    def with_response(self, response: Sequence[int]) -> "Rows":
        """Return these rows with the ids of the true response, if they are the rows of a reference score without it."""
        return self

    def asked(self, questions: Sequence[Question]) -> "Rows":
        """Return these rows for one read in which each batch row's question observes. Raises ValueError for rows that
        cannot be chosen."""
        raise ValueError(
            "kvevict.observing chooses the tokens that are appended to chunks, and these rows append none of the "
            "prompt's: choose take, take+edie or another policy with rows='probe'"
        )

    def keeping(self, requests: tuple[tuple[int, ...], ...]) -> "Rows":
        """Return these rows for one read that keeps each batch row's request, given as its `Question.request`."""
        return self

    def appended(self, tokens: int, rows: int, last: bool) -> int:
        """Count the rows appended to a chunk of `rows` tokens of a prompt of `tokens` that is evicted from. last: the
        chunk ends the prompt, and may contain some of these rows."""
        return 0

    def prepare(self, arguments: PromptCall, read: PromptRead) -> AppendedRows | None:
        """Prepare a read; the result is `read.prepared`. Raises ValueError for a prompt that cannot be observed."""
        return None

    def rows_for(self, chunk: Chunk, arguments: PromptCall, read: PromptRead) -> AppendedRows:
        """Return the `chunk.appended` rows that are read with a chunk."""
        return read.prepared.last(chunk.appended)

    def accumulate(self, call: LayerRows, past: Any) -> Any:
        """Return what the rows remember of a layer for its next chunks; past: the result for the chunk before, or None.
        Called for every chunk and every layer that chooses, also when nothing is evicted."""
        return past

    def observe(self, call: LayerRows, past: Any) -> Observation:
        """Return the observation of a chunk: `call.chunk(..)`, `call.appended_rows(..)`, `call.later(..)`, or a sum of
        these. past: the result of `accumulate` for this chunk."""
        raise NotImplementedError

    def observing(self, rows: CallRows) -> np.ndarray:
        """Count a call's last rows that observe, appended rows included: int [B]."""
        return rows.tokens if self.most is None else np.minimum(self.most, rows.tokens)

    def protect(self, call: LayerRows) -> Any:
        """Count the last alive slots that are the rows' own and always kept: a number or int32 [B]."""
        return 0

    def bounds(self, call: LayerRows) -> Bounds:
        """Return the positions at which slots are always kept, and those at which a head keeps few."""
        return FREE

    def __deepcopy__(self, memo: object) -> "Rows":  # immutable; a draft model is not to be copied
        return self


load_folder(__name__)
