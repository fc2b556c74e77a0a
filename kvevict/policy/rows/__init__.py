"""The queries that observe (METHODS section 1a). One file per idea; the file registers it, and its fields are its
options.

Rows choose the rows appended to a chunk (read with it, not stored), the queries that observe a layer's slots, and the
queries' slots to keep. A score turns their attention into numbers; every score works with all rows, with the
exceptions in `rules.py`. While decoding nothing is appended: the newest row observes, or the last `decoded` ones.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

from ..inputs import CallRows, Chunk, LayerRows, Observation
from ..registry import Part, Registry, load_folder
from ..seen.slots import FREE, Bounds

ROWS: Registry = Registry("rows")


@dataclass(frozen=True, eq=False)
class AppendedRows:
    """Rows that are read with a chunk, after it, and are not stored."""

    tokens: Any  # ids [B, p] or embeddings [B, p, E]
    positions: Any  # [B, p] in the prompt or after it; None: right after the chunk
    columns: Any = None  # [B, p] their columns in the prompt; None: they are not of the prompt
    adapter: Any = None  # its `on(decoder)` is entered while they are read
    unseen: Any = None  # int32 [B, 2] positions (start, stop) that they do not see; None: they see all

    def last(self, count: int) -> "AppendedRows":
        """Return the last `count` rows."""
        own = {name: getattr(self, name) for name in ("tokens", "positions", "columns")}
        return replace(self, **{name: t if t is None else t[:, -count:] for name, t in own.items()})

    def adapted(self, decoder: Any) -> Any:
        return contextlib.nullcontext() if self.adapter is None else self.adapter.on(decoder)


class Question(NamedTuple):
    """Tokens of a batch row that ask, counted from the row's first."""

    spans: tuple[tuple[int, int], ...]  # (start, stop) of those that observe
    request: tuple[int, ...] = ()  # token counts from a beginning of its request to the prompt's end; (): not there
    before: tuple[int, int, bool] | None = None  # the question before the text: start, stop, whether nothing repeats it
    near: bool = False  # observes in place, near the prompt's end
    last: bool = False  # no question was found: the prompt's last rows observe, as those of the policy


@dataclass(frozen=True)
class Rows(Part):
    needs_full_prompt: ClassVar[bool] = False  # they exist once all of the prompt was read, so layers wait for that
    rotates: ClassVar[bool] = False  # they rotate queries from one position to another: `LayerRows.rotate`
    supports_tensor_parallel: ClassVar[bool] = True  # a rank's part of a model is enough for them
    newest: ClassVar[bool] = False  # while decoding the newest row observes, and none is remembered
    repeats: ClassVar[bool] = False  # reads tokens a second time; with a single cut at the end, the whole prompt
    n_d: ClassVar[int] = 0  # tokens that are drafted

    @property
    def most(self) -> int | None:
        """Number of rows that observe at most; None: no limit."""
        raise NotImplementedError

    @property
    def protected(self) -> int:
        """Number of slots that `protect` keeps at most."""
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
        """Number of decoded rows that are remembered to observe while decoding."""
        return 0

    def ready(self, decoder: Any) -> None:
        """Raise ValueError when an option without a default is missing, or does not fit this decoder; called when a
        model is patched."""

    def with_response(self, response: Any) -> "Rows":
        """Return these rows, given the ids of the true response, for rows of a reference score."""
        return self

    def asked(self, questions: Sequence[Question]) -> "Rows":
        """Return these rows for one read in which each batch row's question observes. Raises ValueError for rows that
        cannot be chosen."""
        raise ValueError(
            "kvevict.observing chooses the tokens that are appended to chunks, and these rows append none of the "
            "prompt's: choose take, take+edie or another policy with rows='probe'"
        )

    def keeping(self, requests: tuple[Any, ...]) -> "Rows":
        """Return these rows for one read that keeps the prompt's request: each batch row's `Question.request`."""
        return self

    def appended(self, tokens: int, rows: int, last: bool) -> int:
        """Count the rows appended to a chunk of `rows` tokens of a prompt of `tokens` that is evicted from. last: the
        chunk ends the prompt, and may contain some of these rows."""
        return 0

    def prepare(self, arguments: Any, read: Any) -> Any:
        """Prepare a read, with the `kvevict.engine.hook.arguments.Arguments` of the call and the `Read`; the result is
        `read.prepared`. Raises ValueError for a prompt that cannot be observed."""

    def rows_for(self, chunk: Chunk, arguments: Any, read: Any) -> AppendedRows:
        """Return the `chunk.appended` rows of a `kvevict.policy.seen.rows.Chunk`."""
        return read.prepared.last(chunk.appended)

    def accumulate(self, call: LayerRows, past: Any) -> Any:
        """Return the rows' memory of a layer for the next chunks, from a `kvevict.policy.seen.rows.LayerRows`
        and the result for the chunk before (None at first). Called for every chunk and every layer that chooses, also
        when nothing is evicted."""
        return past

    def observe(self, call: LayerRows, past: Any) -> Observation:
        """Return the `kvevict.policy.seen.rows.Observation` of a chunk: `call.chunk(..)`,
        `call.appended_rows(..)`, `call.later(..)`, or a sum of these. past: the result of `accumulate` for this
        chunk."""
        raise NotImplementedError

    def observing(self, rows: CallRows) -> Any:
        """Count a call's last rows that observe, appended rows included, by a
        `kvevict.policy.seen.rows.CallRows`: int [B]."""
        raise NotImplementedError

    def protect(self, call: LayerRows) -> Any:
        """Count the last alive slots that belong to the rows and are always kept: a number or int32 [B]."""
        return 0

    def bounds(self, call: LayerRows) -> Bounds:
        """Return the positions of slots that are always kept, or limited in number, wherever the slots are."""
        return FREE

    def __deepcopy__(self, memo: object) -> Any:  # immutable, and its draft model is another model
        return self


load_folder(__name__)
