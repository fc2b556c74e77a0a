"""The states of requests in one layer, as they lie in vLLM's cache, and the eviction from a state before the token that
begins a period.

A state is what a layer stores for one request in one block of vLLM's cache (shape.py). Heads may keep unequal
numbers of slots. Head h begins after the slots that head h - 1 kept and the room for one period, so the slots of all
heads fit in the planes however they are split over the heads.

Where a policy gives all heads equally many slots, the host knows every count, and no step reads a number from the
device. Where heads compete, the host reads the counts of a request that has several rows in a step or begins a period.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..engine.cut import Choice, chosen, cut, is_equal, protected, ranked
from ..engine.measure.quantities import measured
from ..engine.memory.ranks import ALONE
from ..engine.memory.stored import Stored
from ..ops import _ops
from ..policy import kv
from ..policy.rows.window import NoRows
from ..policy.seen.rows import CallRows, LayerRows, Observation, Observers
from ..policy.seen.slots import KV, Heads, Slots
from .questions import NONE, Copies
from .shape import StateShape


class Singles(NamedTuple):
    """The n requests of a step that have one row in it. A row that only pads a graph's step has block 0, in which vLLM
    stores no request, and no slots. The next step overwrites these tensors."""

    blocks: Tensor  # int64 [n]
    is_new: Tensor  # bool [n] whether the request has read no token before
    since: Tensor  # int32 [n, 1] number of tokens that it has read since the last whole period
    place: Tensor  # int64 [n] where the row's query is kept (`VllmOptions.place`); 0 before the rows that observe
    offset: Tensor  # int64 [L, n, Hkv] the first row of each head's slots in each layer
    length: Tensor  # int32 [L, n, Hkv] number of these slots
    numbers: list[int]  # the blocks on the host, if rows of keys and of values have unequal sizes


class States:
    """Views of the states of all blocks in one layer, to which `Layers` adds what it has for all layers."""

    index: int  # this layer's in a `Singles`
    kept: Tensor  # int32 [blocks, Hkv] slots that each head kept at the last eviction
    no_positions: Tensor  # int32 [all rows of all blocks] positions by the decode op, which nobody reads

    def __init__(self, cache: Tensor, shape: StateShape, layer: int, attention: dict) -> None:
        """Make the views of `cache` [blocks, 2, 1, numbers of a plane], in which each of the two planes of all blocks
        must be dense. attention: the options `scale`, `softcap` and `sinks` of the layer's attention."""
        self.shape, self.layer, self.attention, self.options = shape, layer, attention, shape.options
        policy = self.options.policy
        self.equal = is_equal(policy, policy.selection(layer))  # whether all heads keep equally many slots
        heads, dim, near, window = shape.heads, shape.dim, shape.near_keys, shape.options.window
        planes = [cache[:, i, 0].view(torch.uint8) for i in range(2)]  # [blocks, bytes of a plane]
        assert all(plane.is_contiguous() for plane in planes), cache.stride()
        self.k, self.v = (  # [all rows of all blocks, row]
            plane.flatten().view(shape.dtype if kind == kv.MODEL else torch.uint8).unflatten(0, (-1, row))
            for plane, kind, row in zip(planes, shape.kinds, self._widths(), strict=True)
        )
        ends = [shape.rows * row for row in shape.row_bytes]
        numbers = planes[1][:, ends[1] : ends[1] + shape.numbers]
        self.positions = numbers.view(torch.int32)[:, : shape.rows]  # [blocks, rows] each row's position
        more = numbers.view(torch.float32)[:, shape.rows :]
        centres = more[:, : shape.packs * shape.kv_heads * dim]
        self.centres = centres.unflatten(1, (shape.kv_heads, dim)) if shape.packs else None  # [blocks, Hkv, D]
        self.sums = more[:, -shape.rows :] if self.options.sums else None  # [blocks, rows] attention of all rows so far
        # In each plane: which query heads, and their queries of a period's last rows, [blocks, window, heads, dim]
        self.queries = []
        parts = (planes[0], ends[0], 0, near), (planes[1], ends[1] + shape.numbers, near, heads)
        for plane, begin, first, last in parts if window else ():
            end, sizes = begin + (last - first) * shape.query_bytes, (window, last - first, dim)
            if first < last:
                self.queries.append((slice(first, last), plane[:, begin:end].view(shape.dtype).unflatten(1, sizes)))
        self.like = torch.empty(0, dim, dtype=shape.dtype, device=cache.device)
        self.device = cache.device
        self.none = torch.zeros(1, dtype=torch.int32, device=self.device)  # argument `first` of ops: no padding

    def _widths(self) -> list[int]:
        return [
            self.shape.dim if kind == kv.MODEL else row
            for kind, row in zip(self.shape.kinds, self.shape.row_bytes, strict=True)
        ]

    def first_rows(self, block: int) -> tuple[int, int]:
        """The first row of a block in `k`, and in `v`."""
        key, value = (block * (self.shape.plane_bytes // row) for row in self.shape.row_bytes)
        return key, value

    def stored(self, block: int, tokens: int, copies: Copies = NONE) -> Stored:
        """The slots that the next token of the request in `block` finds, which has read `tokens` tokens; at a period's
        end after `begin`. Their rows are counted from the block's first row."""
        end = tokens - copies.before(tokens, self.options.period)
        return self._stored(block, tokens % self.options.period, end)

    def _stored(self, block: int, since: int, end: int) -> Stored:
        """The slots that a request kept at its last eviction, and the `since` ones after them, the last of which has
        the position end - 1."""
        kept, period = self._kept(block, end - since), self.options.period
        starts = np.cumsum(kept + period) - kept - period
        if since:  # `decode` stores no positions
            new = torch.arange(since, device=self.device)
            at = _ops.upload(starts + kept, self.device)[:, None] + new
            self.positions[block][at] = (new + (end - since)).to(torch.int32)
        first = self.first_rows(block)
        k, v = (x[at : at + self.shape.rows] for x, at in zip((self.k, self.v), first, strict=True))
        centre = None if self.centres is None else self.centres[block : block + 1]
        counts, starts = (kept + since)[None], starts[None]
        length = _ops.upload(counts, self.device, torch.int32)
        return Stored(
            k, v, self.positions[block], _ops.upload(starts, self.device), length, centre, *self.shape.kinds,
            counts=counts, starts=starts, like=self.like,
        )  # fmt: skip

    def _kept(self, block: int, tokens: int) -> np.ndarray:
        """The number of slots [Hkv] that each head kept at the last eviction, which was after `tokens` tokens without
        copies (0: there was none)."""
        if tokens and not self.equal:
            return self.kept[block].cpu().numpy()
        return np.full(self.shape.kv_heads, min(tokens, self.options.slots))

    def begin(self, block: int, tokens: int, copies: Copies) -> None:
        """Make the state of the request in `block` ready for the period that begins after `tokens` tokens: evict slots,
        or forget an earlier request's sums."""
        if tokens:
            self.cut(block, tokens, copies)
        elif self.sums is not None:
            self.sums[block] = 0

    def read(self, q: Tensor, k: Tensor, v: Tensor, block: int, tokens: int, copies: Copies = NONE) -> Tensor:
        """Attend with the next T tokens of the request in `block`, which has read `tokens` tokens before, and store
        their keys and values: q [T, H, D], k and v [T, Hkv, D] -> outputs [T, H, D]. Tokens up to a period's end are
        read together, and before a period's first token slots are evicted."""
        out, period = [], self.options.period
        while len(q):
            if self.options.ends(tokens):
                self.begin(block, tokens, copies)
            rows = min(len(q), period - tokens % period)
            out.append(self._read(q[:rows], k[:rows], v[:rows], block, tokens, tokens - copies.before(tokens, period)))
            q, k, v, tokens = q[rows:], k[rows:], v[rows:], tokens + rows
        return out[0] if len(out) == 1 else torch.cat(out)

    def _read(self, q: Tensor, k: Tensor, v: Tensor, block: int, tokens: int, first: int) -> Tensor:
        if self.centres is not None and not tokens:
            self.centres[block] = k[0]
        stored, rows = self._stored(block, tokens % self.options.period, first), len(q)
        queries, keys, values = (x.transpose(0, 1)[None] for x in (q, k, v))
        position = torch.arange(first, first + rows, dtype=torch.int32, device=self.device)[None]
        _ops.compact(stored, keys, values, position, self.none, None, stored.len + rows, stored)
        if self.shape.packs:  # every row sees the numbers that are stored, so that a step's end changes nothing
            keys, values = self._numbers(stored, stored.len, rows)
        out, lse = _ops.attend(queries, stored, keys, values, self.none, **self.attention)
        if self.sums is not None:
            columns, end = stored.longest() + rows, self.none + rows
            options = dict(causal=True, reduce="sum", columns=columns) | self.attention
            sums = _ops.score(queries, self.none, stored, keys, self.none, end, lse, **options)
            self._add(_ops.upload([block], self.device), stored.offset, stored.len + rows, sums)
        place = self.options.place(tokens)
        new = min(rows, rows + place)  # number of these rows that are among the period's observing rows
        if new > 0:
            self._watch(q[-new:], block, slice(max(place, 0), max(place, 0) + new))
        return out[0]

    def decode(self, q: Tensor, k: Tensor, v: Tensor, step: Singles) -> Tensor:
        """Attend with one new row of each of n requests and store its key and value: q [n, H, D], k and v [n, Hkv, D]
        -> outputs [n, H, D]. A period's first row needs `begin` before. The operators and the addresses of what they
        read and write depend on n alone, unless requests are decoded one by one."""
        centre = None
        if self.centres is not None:
            centre = torch.where(step.is_new[:, None, None], k.float(), self.centres[step.blocks])
            self.centres[step.blocks] = centre
        self._watch(q, step.blocks, step.place)  # a row that does not observe is overwritten by the first one that does
        start, length = step.offset[self.index], step.length[self.index]
        queries, keys, values = (x.unsqueeze(2) for x in (q, k, v))
        together = [slice(None)] if self.options.alike else [slice(i, i + 1) for i in range(len(q))]
        most = self.options.slots * (1 if self.equal else self.shape.kv_heads)  # that a head keeps at an eviction
        columns = 0 if self.sums is None else most + self.options.period
        done = [
            _ops.decode(queries[i], keys[i], values[i], step.since[i], held, columns=columns, **self.attention)
            for i, held in zip(together, self._held(step, start, length, centre), strict=True)
        ]
        out = done[0][0] if len(done) == 1 else torch.cat([each[0] for each in done])
        if self.sums is not None:
            start = start - (step.blocks * self.shape.pitch)[:, None]
            self._add(step.blocks, start, length + 1, torch.cat([each[2] for each in done]))
        return out[:, 0]

    def _held(self, step: Singles, start: Tensor, length: Tensor, centre: Tensor | None) -> Iterator[_ops.Held]:
        """Yield the slots of a step's n requests: together if a block begins at the same row of keys and of values,
        else one request after the other."""
        kinds = self.shape.kinds
        if self.options.alike:
            yield _ops.Held(self.k, self.v, self.no_positions, start, length, centre, *kinds)
            return
        for i, block in enumerate(step.numbers):
            at = self.first_rows(block)
            k, v = (x[first : first + self.shape.rows] for x, first in zip((self.k, self.v), at, strict=True))
            of = None if centre is None else centre[i : i + 1]
            yield _ops.Held(k, v, self.no_positions[: len(k)], start[i : i + 1], length[i : i + 1], of, *kinds)

    def _numbers(self, stored: Stored, begin: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Read the keys and values [1, Hkv, count, D] of slots begin .. begin + count - 1 of each head. begin: [1,
        Hkv]."""
        at = stored.offset[..., None] + begin[..., None] + torch.arange(count, device=self.device)
        if not self.shape.packs:
            return stored.k[at], stored.v[at]
        k, v = (
            kv.numbers(rows[at].flatten(0, 2), kind, self.shape.dim).view(*at.shape, -1)
            for rows, kind in zip((stored.k, stored.v), self.shape.kinds, strict=True)
        )
        assert stored.centre is not None
        return (k + stored.centre[:, :, None]).to(self.like.dtype), v.to(self.like.dtype)

    def _add(self, blocks: Tensor, start: Tensor, length: Tensor, sums: Tensor) -> None:
        """Add the attention weights sums [n, Hkv, C] that n requests' new rows give to each slot. start, length
        [n, Hkv]: where the heads' slots begin in their blocks, and their number, the new ones included."""
        assert self.sums is not None
        column = torch.arange(sums.shape[2], device=self.device)
        at = (start[..., None] + column).clamp_max(self.shape.rows - 1)
        sums = sums.masked_fill(column >= length[..., None], 0)
        self.sums.index_put_((blocks[:, None, None].expand_as(at), at), sums, accumulate=True)

    def _watch(self, q: Tensor, block: int | Tensor, places: slice | Tensor) -> None:
        """Keep queries [.., H, D] of observing rows in the states of their requests. places: their indices among the
        period's observing rows (`VllmOptions.place`)."""
        for heads, queries in self.queries:
            queries[block, places] = q[..., heads, :]

    def cut(self, block: int, tokens: int, copies: Copies) -> None:
        """Evict slots of the request in `block`, which has read `tokens` tokens, a multiple of the period. The rows of
        a copy that ends the period observe, and none of them stays."""
        options, heads = self.options, self.shape.kv_heads
        copied = copies.ending(tokens, options.period)
        end = tokens - copied - copies.before(tokens - 1, options.period)  # tokens of the request without copies
        stored = self._stored(block, options.period - copied, end)
        slots = np.array([options.slots * heads])
        if (stored.counts.sum(1) > slots).any():
            index, kept = self._chosen(stored, block, end, slots, copied)
        else:
            index = torch.arange(int(stored.counts.max()), device=self.device).expand(1, heads, -1)
            index, kept = index.masked_fill(index >= stored.len[..., None], -1), stored.len
        ends = (kept[0].long() + options.period).cumsum(0)
        first = ends - kept[0] - options.period  # the new first row of each head in its block
        new = first[:, None] + torch.arange(index.shape[2], device=self.device)
        old = stored.offset[0, :, None] + index[0]
        if not self.equal:
            there = index[0] >= 0
            new, old = new[there], old[there]
        for each in stored.buffers:
            each[new] = each[old]
        if self.sums is not None:
            sums = self.sums[block]
            self.sums[block] = torch.zeros_like(sums).index_put_((new,), sums[old])
        self.kept[block] = kept[0]

    def _chosen(self, stored: Stored, block: int, tokens: int, keep: np.ndarray, copied: int) -> tuple[Tensor, Tensor]:
        """(indices [1, Hkv, K] of the slots that stay, -1 after a head's last one; their number [1, Hkv]). keep [1]:
        the number of slots that stay over all heads. tokens: those read, without copies."""
        policy, none = self.options.policy, self.none
        empty = self.like.expand(1, self.shape.kv_heads, 0, -1)
        call = CallRows(positions=none[None] + tokens - 1, first=none, padding=np.zeros(1, int))
        rows = LayerRows(call, np.array([self.options.slots]), None, None, None, None)
        # With a copy no last slot is protected. `policy.rows` is not the name of a `Rows`, since the policy is built.
        observers: Any = NoRows() if copied else policy.rows
        ends = protected(policy, observers, self.layer, rows, stored.counts.max(1))
        kv = KV(stored, empty, empty, none, self.attention)
        slots = Slots(self.layer, Heads(ALONE, self.shape.kv_heads), stored.counts, ends, none[None, :0], stored, kv)
        if self.sums is None:
            observation = self._observation(stored, block, copied) if self.options.window else None
            choice = cut(policy, slots, observation, keep, order=self.layer)
        else:
            choice = self._best_sums(slots, block, keep)
        return choice.index, _ops.upload(choice.keep, self.device, torch.int32)

    def _best_sums(self, slots: Slots, block: int, keep: np.ndarray) -> Choice:
        """Choose slots by the sums of their attention weights: the stages of `cut` after the score."""
        assert self.sums is not None
        policy, column = self.options.policy, torch.arange(slots.columns, device=self.device)
        at = (slots.stored.offset[..., None] + column).clamp_max(self.shape.rows - 1)
        score = torch.where(column < slots.n[..., None], self.sums[block][at], 0)
        measure = partial(measured, slots=slots, observation=None, given={}, known={})
        for factor in measure(policy.score.factors):
            score = score * factor
        ranks = ranked(policy, slots, score, self.layer)
        return chosen(policy, slots, ranks, keep, measure(policy.refine.picks_by), order=self.layer)

    def _observation(self, stored: Stored, block: int, copied: int) -> Observation:
        """The observation by the period's last rows, with their attention outputs over the slots that each row sees. A
        copy's rows come after all slots and see all of them, as a probe's appended rows do."""
        rows, none = copied or self.options.window, self.none
        q = torch.cat([queries[block, -rows:] for _, queries in self.queries], 1).transpose(0, 1)[None]
        if copied:
            return Observation((Observers(q, none, none, False),))
        before = stored.len - rows
        out, lse = _ops.attend(q, stored.held(before), *self._numbers(stored, before, rows), none, **self.attention)
        return Observation((Observers(q, none, none, True, lse, out),))
