"""Rows choose the queries whose attention scores slots (METHODS section 1a). Each module registers the kinds of rows
that it defines; the fields of a `Rows` are its options.

A `Rows` chooses the rows that are appended to a chunk (read after it and not stored), the queries that observe a
layer's slots, and which of the observing rows' own slots are always kept. A score turns the attention of these queries
into one number per slot; every score works with every `Rows`, except for the combinations in `rules.py`. While
decoding, no rows are appended: the newest row observes, or the last `decoded` rows.
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
    """Rows that are read together with a chunk, after its tokens, and are not stored."""

    tokens: torch.Tensor  # token ids [B, p] or embeddings [B, p, E] of the p appended rows
    positions: torch.Tensor | None  # [B, p] positions of the rows; None: the positions right after the chunk
    columns: torch.Tensor | None = None  # [B, p] columns of the prompt that the rows copy; None: they copy none
    adapter: Any = None  # the rows are read inside its context manager `on(decoder)`; None: as other rows
    unseen: Any = None  # int32 [B, 2] positions (start, stop) that the rows do not attend to; None: they attend to all

    def last(self, count: int) -> "AppendedRows":
        """Return a copy with the last `count` rows only."""
        positions, columns = (None if t is None else t[:, -count:] for t in (self.positions, self.columns))
        return replace(self, tokens=self.tokens[:, -count:], positions=positions, columns=columns)

    def adapted(self, decoder: Any) -> AbstractContextManager[Any]:
        """Return the context manager in which the decoder reads the rows."""
        return contextlib.nullcontext() if self.adapter is None else self.adapter.on(decoder)


class Question(NamedTuple):
    """The question in a batch row's prompt. Tokens are counted from the row's first token."""

    spans: tuple[tuple[int, int], ...]  # (start, stop) of the tokens that observe
    # for each place where the request may begin, the number of tokens from there to the prompt's end; (): no request
    request: tuple[int, ...] = ()
    # (start, stop, once) of a question before the text; once: the prompt's end does not repeat it
    before: tuple[int, int, bool] | None = None
    near: bool = False  # the question is near the prompt's end, and its own rows observe in the last chunk
    last: bool = False  # no question was found, so the prompt's last rows observe


class Found(NamedTuple):
    """The question of a batch row as `kvevict.report` shows it."""

    text: str | None  # None: unknown, since there is no tokenizer
    tokens: int  # number of tokens of the question, or of the prompt's last tokens that take its place
    how: str  # "named", "template" (in the last user's turn), "prompt" (no template: in all of it) or "last tokens"
    missing: str = ""  # why no question was found, for a warning; "": it was found, or was not to be looked for


@dataclass(frozen=True)
class Rows(Part):
    needs_full_prompt: ClassVar[bool] = False  # the rows exist only once the whole prompt was read: no eviction before
    rotates: ClassVar[bool] = False  # lets `LayerRows.averaged` rotate queries from one position to another
    supports_tensor_parallel: ClassVar[bool] = True  # works if each rank has only a part of the model's weights
    newest: ClassVar[bool] = False  # while decoding, only the newest row observes, and no earlier queries are stored
    repeats: ClassVar[bool] = False  # tokens are read again and observe: each chunk's, or the whole prompt's at its end
    n_d: ClassVar[int] = 0  # number of drafted tokens

    @property
    def most(self) -> int | None:
        """The largest number of observing rows; None: no limit."""
        raise NotImplementedError

    @property
    def protected(self) -> int:
        """The largest number of slots that `protect` can return."""
        return 0

    @property
    def at_the_end(self) -> bool:
        """Whether the prompt's last tokens observe because they are expected to be the question. If a question is found
        elsewhere in the prompt, its tokens observe instead."""
        return False

    @property
    def needs_question(self) -> bool:
        """Whether only rows at the prompt's end or after it observe, so that the question must stand there or be
        given."""
        return bool(self.decoded)

    @property
    def decoded(self) -> int:
        """The number of last decoded rows whose queries are stored to observe while decoding."""
        return 0

    def ready(self, decoder: Any) -> None:
        """Raise ValueError if a required option is missing or an option does not fit this decoder. Called when a model
        is patched."""

    def with_response(self, response: Sequence[int]) -> "Rows":
        """Return rows that observe with the true response's ids, if these rows need a response and have none yet; all
        other rows return themselves."""
        return self

    def asked(self, questions: Sequence[Question]) -> "Rows":
        """Return a copy of these rows for one prompt, in which the tokens of each batch row's question observe. Raises
        ValueError if the observing tokens of these rows cannot be chosen."""
        raise ValueError(
            "kvevict.observing chooses the tokens that are appended to chunks, and these rows append none of the "
            "prompt's: choose take, take+edie or another policy with rows='probe'"
        )

    def keeping(self, requests: tuple[tuple[int, ...], ...]) -> "Rows":
        """Return rows for one prompt that observe as these and always keep the slots of each batch row's request; rows
        that cannot do so return themselves. requests: for each batch row, its `Question.request`."""
        return self

    def appended(self, tokens: int, rows: int, last: bool) -> int:
        """Return the number of rows that are appended to a chunk of `rows` tokens, in a prompt of `tokens` tokens that
        is evicted from. last: the chunk ends the prompt, and may itself contain tokens that would be appended."""
        return 0

    def prepare(self, arguments: PromptCall, read: PromptRead) -> AppendedRows | None:
        """Prepare the read of a prompt; the result becomes `read.prepared`. Raises ValueError if these rows cannot
        observe the prompt."""
        return None

    def rows_for(self, chunk: Chunk, arguments: PromptCall, read: PromptRead) -> AppendedRows:
        """Return the rows that are appended to a chunk, `chunk.appended` of them."""
        return read.prepared.last(chunk.appended)

    def accumulate(self, call: LayerRows, past: Any) -> Any:
        """Return the state that is passed on to a layer's next chunk. past: the result for the chunk before, or None.
        Called for every chunk in every layer that chooses slots, even if nothing is evicted."""
        return past

    def observe(self, call: LayerRows, past: Any) -> Observation:
        """Return the observation of a chunk in one layer: the result of a method of `call` such as `chunk`,
        `appended_rows` or `later`, or a sum of several results. past: the result of `accumulate` for this chunk."""
        raise NotImplementedError

    def observing(self, rows: CallRows) -> np.ndarray:
        """Return how many of a call's last rows observe, appended rows included: int [B]."""
        return rows.tokens if self.most is None else np.minimum(self.most, rows.tokens)

    def protect(self, call: LayerRows) -> Any:
        """Return how many last alive slots are always kept because they belong to the observing rows: int or int32
        [B]."""
        return 0

    def bounds(self, call: LayerRows) -> Bounds:
        """Return the positions at which slots are always kept, and the positions at which each head keeps at most a
        given number of slots."""
        return FREE

    def __deepcopy__(self, memo: object) -> "Rows":  # immutable, and may hold a draft model
        return self


load_folder(__name__)
