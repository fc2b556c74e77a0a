"""The rows of a decoder call, and the queries, from these rows or others, that observe a layer's slots."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch

from ...ops import _ops

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, eq=False)
class Observers:
    """R queries (rows) per head that observe one layer's alive slots."""

    q: torch.Tensor  # [B, H, R, D] the queries
    skip: torch.Tensor  # [B] number of first rows that do not count
    stop: torch.Tensor  # [B] the rows do not see new columns from stop[b] on
    causal: bool  # True: row r is that of the r-th of the last R alive slots, sees no later slot; False: all see all
    lse: Any = None  # [B, H, R] log-sum-exp of the rows' logits; None: to be computed over the slots that they see
    out: torch.Tensor | None = None  # [B, R, H, D] the rows' attention outputs; None: as `lse`, or not needed
    probs: torch.Tensor | None = None  # [B, Hkv, C] attention of a single row, mean over the group; None: not known
    own: Tensors | None = None  # keys and values [B, Hkv, R, D] of the rows; None: the softmax does not span them
    until: Any = None  # [B, 1] the last row's position, if the rows are decoded and their slots may be evicted
    unseen: Any = None  # int32 [B, 2] positions (start, stop) that the rows do not see; None: no such positions
    # if the rows repeat a part of a stored prompt: (number of the prompt's tokens, first repeated token, number of
    # repeated tokens), int32 [B] each
    of: Tensors | None = None


def rolled(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Roll the R rows of x [B, H, R, ..] by by[b] places in each batch row b, so that the last by[b] rows come
    first."""
    row = (torch.arange(x.shape[2], device=x.device) - by[:, None]) % x.shape[2]
    row = row[:, None].expand(-1, x.shape[1], -1)
    return x.gather(2, row[(..., *[None] * (x.ndim - 3))].expand_as(x))


@dataclass(frozen=True, eq=False)
class Observation:
    """The rows that observe one layer's slots, in parts whose attention is computed one by one."""

    parts: tuple[Observers, ...]

    def __add__(self, other: "Observation") -> "Observation":
        return Observation(self.parts + other.parts)

    @cached_property
    def row_count(self) -> torch.Tensor:
        """The number of observing rows, int64 [B]."""
        return sum(part.q.shape[2] - part.skip for part in self.parts).long()


@dataclass(frozen=True)
class Chunk:
    """A part of a prompt that the decoder reads in one call: columns start .. end - 1 of the prompt."""

    start: int  # number of the prompt's columns before the chunk
    end: int
    last: bool  # the chunk ends the prompt
    appended: int  # number of rows that are read after the chunk's tokens and not stored
    observed: bool = True  # rows observe during this chunk; False: only after all chunks were read
    again: range | None = None  # tokens, counted from 0 in each batch row, that a chunk without columns repeats

    @property
    def rows(self) -> int:
        return self.end - self.start


class PromptCall(Protocol):
    """The facts about a decoder call with a prompt that `Rows` use; implemented by
    `kvevict.engine.hook.arguments.Arguments`."""

    decoder: Any
    top: Any  # the model that called the decoder, or None
    policy: Any
    ids: Any  # token ids [B, N]; None: the call has embeddings
    first: Any  # [B] number of columns of left padding
    columns: int  # number of columns in the cache before this call
    batch: int
    device: Any
    tokens_at: Any  # function (columns [B, p]) -> ids [B, p] or embeddings [B, p, E] of the call's tokens there
    embedded: Any  # function (ids [B, p]) -> the ids, or their embeddings if the call has embeddings
    positions: Any  # function () -> positions [B, N] of the call's tokens


class PromptRead(Protocol):
    """The facts about the read of a prompt that `Rows` use; implemented by `kvevict.engine.read.step.Read`."""

    @property
    def prompt(self) -> int: ...  # number of the prompt's columns, padding included
    @property
    def tokens(self) -> np.ndarray: ...  # [B] number of the prompt's tokens, without padding
    @property
    def prepared(self) -> Any: ...  # result of `Rows.prepare`
    @property
    def policy(self) -> Any: ...
    @property
    def seen(self) -> Any: ...  # [B] number of tokens read so far, this prompt included
    @property
    def evicts(self) -> bool: ...


@dataclass(frozen=True, eq=False, kw_only=True)
class CallRows:
    """The facts about a decoder call's T rows that are equal in every layer."""

    positions: torch.Tensor  # [B, T] int32 positions of the rows, appended rows included
    first: torch.Tensor  # [B] int32 number of columns of left padding
    padding: np.ndarray  # `first` on the host
    read: Any = None  # the `PromptRead` of the prompt that is read; None: the call's tokens come after a prompt
    chunk: Chunk | None = None  # the part of the prompt that this call reads

    decoding = property(lambda self: self.read is None and self.positions.shape[1] == 1)  # the row is a decoded token
    appended = property(lambda self: 0 if self.chunk is None else self.chunk.appended)  # number of rows not stored
    ends_prompt = property(lambda self: self.chunk is not None and self.chunk.last)
    again = property(lambda self: None if self.chunk is None else self.chunk.again)  # tokens that the call repeats
    # int [B] number of rows without padding, appended rows included, on the host
    tokens = property(lambda self: self.positions.shape[1] - self.padding)

    @cached_property
    def columns(self) -> int:
        """The number of the call's rows that are stored when a layer's slots are cut; 0 for a decoded token, whose slot
        is stored before that."""
        return 0 if self.decoding else self.positions.shape[1] - self.appended


@dataclass(frozen=True, eq=False)
class LayerRows:
    """The T rows of a decoder call in one layer. The last `appended` rows are read after the chunk's tokens and not
    stored.

    The methods `chunk`, `appended_rows`, `repeated_rows`, `drafted_rows` and `later` each return an `Observation`.
    """

    rows: CallRows
    host_budget: np.ndarray  # [B] slots per kv head, on average, that the layer may keep; 0: no budget is set yet
    rope: Any  # the layer's kvevict.engine.measure.rope.Rope
    q: Any  # [B, H, T, D] queries; q, out and lse are None in a copy for a layer that waits for another layer's choice
    out: Any  # [B, T, H, D] attention outputs
    lse: Any  # [B, H, T] log-sum-exp of the logits
    drafted: Tensors | None = None  # (q [B, H, n, D], k, v [B, Hkv, n, D]) of n rows drafted after the prompt

    positions = property(lambda self: self.rows.positions)
    columns = property(lambda self: self.rows.columns)  # S, the number of the call's stored rows
    decoding = property(lambda self: self.rows.decoding)
    appended = property(lambda self: self.rows.appended)
    ends_prompt = property(lambda self: self.rows.ends_prompt)
    read = property(lambda self: self.rows.read)
    left = property(lambda self: self.read.prompt - self.rows.chunk.end)  # number of prompt columns after the call
    last_position = property(lambda self: self.positions[:, -1])  # [B] position of the last row, stored or appended
    next_position = property(lambda self: self.positions[:, self.columns - 1] + 1)  # [B] after the last stored row's
    has_tokens = property(lambda self: self.first < self.columns)  # bool [B]: not all stored rows are padding
    budget = property(lambda self: self.upload(self.host_budget))  # `host_budget` on the device, int32 [B]
    end = property(lambda self: self.columns + 0 * self.first)  # [B] `stop` of `Observers` that see all new columns

    @cached_property
    def first(self) -> torch.Tensor:
        """The number of columns of left padding among the stored rows, int32 [B]."""
        return self.rows.first.clamp_max(self.columns)

    def upload(self, numbers: np.ndarray) -> torch.Tensor:
        """Copy numbers [B] from the host to the layer's device, as int32."""
        return _ops.upload(numbers, self.rows.first.device, torch.int32)

    def averaged(
        self, past: torch.Tensor, queries: torch.Tensor, decay: torch.Tensor, moved: Tensors | None
    ) -> torch.Tensor:
        """Return decay[b] * past + (1 - decay[b]) * queries, fp32 [B, H, p, D], with past and queries [B, H, p, D].
        moved: (position_from [B], position_to [B]), from which and to which the past is rotated first, as the model
        rotates queries; None: it is not. Only for `Rows` with `rotates = True`."""
        factors = None if moved is None else self.rope.factors(past.shape[3], *moved)
        return _ops.probe(queries, past, decay, *(factors or ()))

    def stored_from(self, column: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (queries [B, H, count, D] of `count` stored rows from column[b] on, position [B] of the first of
        them). After the last stored row, that row is repeated."""
        at = (column.long()[:, None] + torch.arange(count, device=self.q.device)).clamp(0, self.columns - 1)
        rows = at[:, None, :, None].expand(-1, self.q.shape[1], -1, self.q.shape[3])
        return self.q.gather(2, rows), self.positions.gather(1, at[:, :1])[:, 0]

    def chunk(self, count: int | None = None, at_most: torch.Tensor | None = None) -> Observation:
        """Return the observation by the last `count` stored rows (None: all rows), of which at most the last at_most[b]
        count in batch row b."""
        stop = self.q.shape[2] - self.appended
        start = stop - (stop if count is None else min(count, stop))
        skip = torch.clamp_min(self.first - (self.columns - (stop - start)), 0)
        if at_most is not None:
            skip = torch.maximum(skip, stop - start - at_most)
        out = None if self.out is None else self.out[:, start:stop]
        rows = Observers(self.q[:, :, start:stop], skip, self.end, True, self.lse[:, :, start:stop], out)
        return Observation((rows,))

    def appended_rows(self, own: bool = True, count: int | None = None) -> Observation:
        """Return the observation by the last `count` appended rows (None: all of them). own: True: the softmax of a row
        also spans the appended rows up to itself."""
        rows, none = count or self.appended, 0 * self.first
        q = self.q[:, :, -rows:]
        if not own:
            return Observation((Observers(q, none, self.end, False),))
        return Observation((Observers(q, none, self.end, False, self.lse[:, :, -rows:], self.out[:, -rows:]),))

    def repeated_rows(self, counts: np.ndarray) -> Observation:
        """Return the observation by the first counts[b] appended rows of each batch row b."""
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
        """Return the observation by the rows drafted after the prompt. own: True: the softmax of a row also spans the
        drafted rows up to itself."""
        q, k, v = self.drafted
        return Observation((Observers(q, 0 * self.first, self.end, False, own=(k, v) if own else None),))

    def later(
        self, queries: torch.Tensor, skip: torch.Tensor | None = None, unseen: int | torch.Tensor = 0,
        counts: np.ndarray | None = None, unseen_at: torch.Tensor | None = None,
    ) -> Observation:  # fmt: skip
        """Return the observation by queries [B, H, R, D] that come after all slots.

        unseen: number (int or [B]) of last slots that the queries do not see; unseen_at: int32 [B, 2] positions (start,
        stop) that they do not see. skip: [B] number of first queries that do not count; or counts: [B] number of first
        queries that count, while the others do not
        """
        if counts is not None:
            skip = self.upload(queries.shape[2] - counts)
            queries = rolled(queries, skip) if (counts < queries.shape[2]).any() else queries
        stop = torch.maximum(self.columns - unseen + 0 * self.first, self.first)
        skip = 0 * self.first if skip is None else skip
        return Observation((Observers(queries, skip, stop, False, unseen=unseen_at),))

    def stored_rows(self, count: int, outputs: bool) -> "LayerRows":
        """Return a copy with the last `count` stored rows alone. outputs: whether their attention outputs are copied,
        too."""
        end = self.q.shape[2] - self.appended
        own = slice(max(end - count, 0), end)
        out = self.out[:, own].clone() if outputs else None
        return replace(self, q=self.q[:, :, own].clone(), lse=self.lse[:, :, own].clone(), out=out)
