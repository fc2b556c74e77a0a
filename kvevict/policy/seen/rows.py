"""A call's rows in one layer, and the rows (of the call, or other queries) that observe the layer's slots."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch

from ...ops import _ops

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, eq=False)
class Observers:
    """R queries of a layer that observe its alive slots."""

    q: torch.Tensor  # [B, H, R, D]
    skip: torch.Tensor  # [B] rows before this one do not count
    stop: torch.Tensor  # [B] new columns from this one on are not seen
    causal: bool  # True: query r belongs to the r-th of the last R alive slots, sees no later one; False: all see all
    lse: Any = None  # [B, H, R] log-sum-exp of the rows' logits; None: over the slots that are seen here
    out: torch.Tensor | None = None  # [B, R, H, D] their attention outputs; None: over the slots that are seen here
    probs: torch.Tensor | None = None  # [B, Hkv, C] a single row's attention, mean over the group, where it is known
    own: Tensors | None = None  # (k, v) [B, Hkv, R, D] of these rows; their softmax spans them too, causally
    until: Any = None  # [B, 1] the last row's position, for decoded rows that may have lost their slots
    unseen: Any = None  # int32 [B, 2] positions (start, stop) that they do not see; None: there are none
    # (tokens of the prompt, all stored; first repeated token; number repeated), int32 [B] each
    of: Tensors | None = None


def rolled(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Move the rows of x [B, H, R, ..] on by by[b] places in each batch row, the last ones to the front."""
    row = (torch.arange(x.shape[2], device=x.device) - by[:, None]) % x.shape[2]
    row = row[:, None].expand(-1, x.shape[1], -1)
    return x.gather(2, row[(..., *[None] * (x.ndim - 3))].expand_as(x))


@dataclass(frozen=True, eq=False)
class Observation:
    """The rows that observe one layer, in parts that are computed one by one."""

    parts: tuple[Observers, ...]

    def __add__(self, other: "Observation") -> "Observation":
        return Observation(self.parts + other.parts)

    @cached_property
    def row_count(self) -> torch.Tensor:
        """The number of observing rows, int64 [B]."""
        return sum(part.q.shape[2] - part.skip for part in self.parts).long()


@dataclass(frozen=True)
class Chunk:
    """A part of a prompt that goes through the decoder at once."""

    start: int  # columns of the prompt before the chunk
    end: int
    last: bool  # the chunk ends the prompt
    appended: int  # rows that are read with the chunk and not stored
    observed: bool = True  # rows observe; False: they observe after all chunks were read
    again: range | None = None  # tokens of every row, counted from 0, to repeat; such a chunk has no columns

    @property
    def rows(self) -> int:
        return self.end - self.start


class PromptCall(Protocol):
    """What rows read of the decoder's call with a prompt, a `kvevict.engine.hook.arguments.Arguments`."""

    decoder: Any
    top: Any  # the model that called the decoder, or None
    policy: Any
    ids: Any  # [B, N]; None: the call has embeddings
    first: Any  # [B] columns of left padding
    columns: int  # number of columns in the cache before this call
    batch: int
    device: Any
    tokens_at: Any  # function of columns [B, p]: ids [B, p] or embeddings [B, p, E]
    embedded: Any  # function of ids [B, p]: ids or embeddings, as the call's tokens are
    positions: Any  # function without arguments: [B, N] of the call's tokens


class PromptRead(Protocol):
    """What rows read of a prompt's read, a `kvevict.engine.read.step.Read`."""

    @property
    def prompt(self) -> int: ...  # columns of the prompt, padding included
    @property
    def tokens(self) -> np.ndarray: ...  # [B] tokens of the prompt
    @property
    def prepared(self) -> Any: ...  # result of `Rows.prepare`
    @property
    def policy(self) -> Any: ...
    @property
    def seen(self) -> Any: ...  # [B] tokens that the cache has after the prompt
    @property
    def evicts(self) -> bool: ...


@dataclass(frozen=True, eq=False, kw_only=True)
class CallRows:
    """The rows of a call, alike in every layer."""

    positions: torch.Tensor  # [B, T] int32, appended rows included
    first: torch.Tensor  # [B] int32 columns of left padding
    padding: np.ndarray  # `first` on the host
    read: Any = None  # the `PromptRead` of the prompt; None: the call's tokens come after a prompt
    chunk: Chunk | None = None  # the part of the prompt that this call reads

    decoding = property(lambda self: self.read is None and self.positions.shape[1] == 1)  # a decoded token
    appended = property(lambda self: 0 if self.chunk is None else self.chunk.appended)  # the last rows, not stored
    ends_prompt = property(lambda self: self.chunk is not None and self.chunk.last)
    again = property(lambda self: None if self.chunk is None else self.chunk.again)  # None: the call reads its columns
    # int [B] rows without padding, appended ones included; on the host
    tokens = property(lambda self: self.positions.shape[1] - self.padding)

    @cached_property
    def columns(self) -> int:
        """The number of rows that a layer's cut stores; 0 for a decoded token, which is stored earlier."""
        return 0 if self.decoding else self.positions.shape[1] - self.appended


@dataclass(frozen=True, eq=False)
class LayerRows:
    """The T rows of a call in one layer. The last `appended` are read with the chunk and not stored.

    `chunk`, `appended_rows`, `repeated_rows`, `drafted_rows` and `later` make observations of them.
    """

    rows: CallRows
    host_budget: np.ndarray  # [B] slots per kv head, on average, that the layer may keep; 0 before a call that evicts
    rope: Any  # the layer's kvevict.engine.measure.rope.Rope
    q: Any  # [B, H, T, D]; None, as out and lse, in a copy whose layer waits for another layer's choice
    out: Any  # [B, T, H, D]
    lse: Any  # [B, H, T]
    drafted: Tensors | None = None  # (q [B, H, n, D], k, v [B, Hkv, n, D]) of n rows drafted after the prompt

    positions = property(lambda self: self.rows.positions)
    columns = property(lambda self: self.rows.columns)  # S, the call's stored rows
    decoding = property(lambda self: self.rows.decoding)
    appended = property(lambda self: self.rows.appended)
    ends_prompt = property(lambda self: self.rows.ends_prompt)
    read = property(lambda self: self.rows.read)
    left = property(lambda self: self.read.prompt - self.rows.chunk.end)  # columns of the prompt after the call
    last_position = property(lambda self: self.positions[:, -1])  # [B], of the last appended row if there is one
    next_position = property(lambda self: self.positions[:, self.columns - 1] + 1)  # [B], after the last stored row
    has_tokens = property(lambda self: self.first < self.columns)  # bool [B]: not all stored rows are padding
    budget = property(lambda self: self.upload(self.host_budget))  # int32 [B] on the layer's device
    end = property(lambda self: self.columns + 0 * self.first)  # [B] number of new columns, if all of them count

    @cached_property
    def first(self) -> torch.Tensor:
        """The columns of left padding among the stored rows, int32 [B]."""
        return self.rows.first.clamp_max(self.columns)

    def upload(self, numbers: np.ndarray) -> torch.Tensor:
        """Copy numbers [B] on the host to the layer's device: int32."""
        return _ops.upload(numbers, self.rows.first.device, torch.int32)

    def rotate(self, queries: torch.Tensor, position_from: torch.Tensor, position_to: torch.Tensor) -> torch.Tensor:
        """Rotate queries [B, H, p, D] by the model's rotary angle between two positions [B]. Only for rows with
        `rotates = True`."""
        return self.rope.rotated(queries, position_from, position_to)

    def stored_from(self, column: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (queries [B, H, count, D] of the stored rows from column [B] on, [B] the first one's position). Past
        the end the last stored row is repeated."""
        at = (column.long()[:, None] + torch.arange(count, device=self.q.device)).clamp(0, self.columns - 1)
        rows = at[:, None, :, None].expand(-1, self.q.shape[1], -1, self.q.shape[3])
        return self.q.gather(2, rows), self.positions.gather(1, at[:, :1])[:, 0]

    def chunk(self, count: int | None = None, at_most: torch.Tensor | None = None) -> Observation:
        """Observe by the last `count` stored rows (None: all), at most at_most[b] in batch row b."""
        stop = self.q.shape[2] - self.appended
        start = stop - (stop if count is None else min(count, stop))
        skip = torch.clamp_min(self.first - (self.columns - (stop - start)), 0)
        if at_most is not None:
            skip = torch.maximum(skip, stop - start - at_most)
        out = None if self.out is None else self.out[:, start:stop]
        rows = Observers(self.q[:, :, start:stop], skip, self.end, True, self.lse[:, :, start:stop], out)
        return Observation((rows,))

    def appended_rows(self, own: bool = True, count: int | None = None) -> Observation:
        """Observe by the last `count` appended rows (None: all). own: their softmax spans the appended rows before
        them, too."""
        rows, none = count or self.appended, 0 * self.first
        q = self.q[:, :, -rows:]
        if not own:
            return Observation((Observers(q, none, self.end, False),))
        return Observation((Observers(q, none, self.end, False, self.lse[:, :, -rows:], self.out[:, -rows:]),))

    def repeated_rows(self, counts: np.ndarray) -> Observation:
        """Observe by the first counts[b] appended rows of each batch row."""
        q, lse, out, skip = self.q, self.lse, self.out, self.upload(self.appended - counts)
        q, lse, out = q[:, :, -self.appended :], lse[:, :, -self.appended :], out[:, -self.appended :]
        if (counts < self.appended).any():
            q, lse, out = (rolled(x, skip) for x in (q, lse, out.transpose(1, 2)))
            out = out.transpose(1, 2)
        of, again = None, self.rows.again
        if again is not None:
            tokens = self.read.tokens
            start = np.minimum(tokens, again.start)
            of = tuple(map(self.upload, (tokens, start, np.minimum(tokens - start, len(again)))))
        return Observation((Observers(q, skip, self.end, False, lse, out, of=of),))

    def drafted_rows(self, own: bool) -> Observation:
        """Observe by the rows drafted after the prompt. own: their softmax spans the drafted slots, too."""
        q, k, v = self.drafted
        return Observation((Observers(q, 0 * self.first, self.end, False, own=(k, v) if own else None),))

    def later(
        self, queries: torch.Tensor, skip: torch.Tensor | None = None, unseen: int | torch.Tensor = 0,
        counts: np.ndarray | None = None, unseen_at: torch.Tensor | None = None,
    ) -> Observation:  # fmt: skip
        """Observe by queries [B, H, R, D] later than all slots. They do not see the last `unseen` slots (a number or
        [B]), nor those at the positions `unseen_at` (int32 [B, 2], start and stop). The first skip [B] queries do not
        count, or only the first counts[b] do."""
        if counts is not None:
            skip = self.upload(queries.shape[2] - counts)
            queries = rolled(queries, skip) if (counts < queries.shape[2]).any() else queries
        stop = torch.maximum(self.columns - unseen + 0 * self.first, self.first)
        skip = 0 * self.first if skip is None else skip
        return Observation((Observers(queries, skip, stop, False, unseen=unseen_at),))

    def stored_rows(self, count: int, outputs: bool) -> "LayerRows":
        """Copy the last `count` of the stored rows."""
        end = self.q.shape[2] - self.appended
        own = slice(max(end - count, 0), end)
        out = self.out[:, own].clone() if outputs else None
        return replace(self, q=self.q[:, :, own].clone(), lse=self.lse[:, :, own].clone(), out=out)
