"""The states of requests in one layer, as they lie in vLLM's cache, and the eviction from a state at a period's end.

A state is all that a layer stores for one request, in one block of vLLM's cache. It has two planes of equal size. The
first plane has the rows of keys and the last queries of some query heads. The second has the rows of values, the
position of every row, the number of slots that each head kept at the last eviction, and the last queries of the other
heads. Heads may keep unequal numbers of slots. Head h begins after the slots that head h - 1 kept and the room for one
period, so the slots of all heads fit in the planes however they are split over the heads.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..engine.cut import cut, protected
from ..engine.memory.ranks import ALONE
from ..engine.memory.stored import Stored
from ..ops import _ops
from ..policy.seen.rows import CallRows, LayerRows, Observation, Observers
from ..policy.seen.slots import KV, Heads, Slots
from .options import VllmOptions


@dataclass(frozen=True)
class StateShape:
    """The sizes of a request's state in one layer. A row has `dim` numbers of `dtype`."""

    kv_heads: int
    dim: int
    dtype: torch.dtype
    options: VllmOptions

    heads = property(lambda self: self.kv_heads * self.options.group)
    rows = property(lambda self: self.kv_heads * (self.options.slots + self.options.period))
    row_bytes = property(lambda self: self.dim * self.dtype.itemsize)

    @property
    def numbers(self) -> int:
        """The number of rows of the second plane that the int32 positions and slot counts fill."""
        return -(-4 * (self.rows + self.kv_heads) // self.row_bytes)

    @property
    def near_keys(self) -> int:
        """The number of query heads whose last queries lie in the first plane, chosen so that both planes are about
        equally full."""
        window = max(self.options.window, 1)
        return min(self.heads, -(-(self.options.window * self.heads + self.numbers) // (2 * window)))

    @property
    def plane(self) -> int:
        """The number of rows of a plane."""
        queries = [self.options.window * heads for heads in (self.near_keys, self.heads - self.near_keys)]
        return self.rows + max(queries[0], self.numbers + queries[1])

    @property
    def plane_bytes(self) -> int:
        return self.plane * self.row_bytes


class States:
    """Views of the states of all blocks in one layer: block b has the rows of `k` and of `v` from b * `shape.plane`
    on."""

    def __init__(self, cache: Tensor, shape: StateShape, layer: int, attention: dict) -> None:
        """Make the views of `cache` [blocks, 2, 1, plane * dim], in which each of the two planes [blocks, plane * dim]
        must be dense. attention: the options `scale`, `softcap` and `sinks` of the layer's attention."""
        self.shape, self.layer, self.attention, self.options = shape, layer, attention, shape.options
        rows, dim, near, window = shape.rows, shape.dim, shape.near_keys, shape.options.window
        planes = [cache[:, i, 0].unflatten(1, (-1, dim)) for i in range(2)]  # [blocks, plane, dim]
        self.k, self.v = (plane.flatten(0, 1) for plane in planes)
        assert self.k.data_ptr() == planes[0].data_ptr() and self.v.data_ptr() == planes[1].data_ptr(), cache.stride()
        numbers = planes[1].flatten(1)[:, rows * dim :].view(torch.int32)
        self.positions = numbers[:, :rows]  # [blocks, rows] the position of each row of keys and values
        self.kept = numbers[:, rows : rows + shape.kv_heads]  # [blocks, Hkv] slots that each head kept at the last cut
        places = (planes[0], rows, near), (planes[1], rows + shape.numbers, shape.heads - near)
        self.queries = [  # in each plane [blocks, window, heads, dim]: the queries of a period's last rows
            plane[:, first : first + window * heads].unflatten(1, (window, heads)) for plane, first, heads in places
        ]
        self.device = cache.device
        self.none = torch.zeros(1, dtype=torch.int32, device=self.device)  # argument `first` of ops: no padding
        self.no_positions = torch.zeros(len(self.k), dtype=torch.int32, device=self.device)

    def slots(self, blocks: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(first row in the block, int64; number of slots, int32) [n, Hkv] of each head of n requests. blocks [n]: the
        requests' blocks; tokens [n]: the numbers of tokens that they have read."""
        period = self.options.period
        # Before a request's first cut `kept` still has the counts of an earlier request in the same block
        kept = torch.where(tokens[:, None] < period, 0, self.kept[blocks])
        return _starts(kept, period), kept + (tokens % period)[:, None].to(torch.int32)

    def stored(self, block: int, tokens: int) -> Stored:
        """The slots of the request in `block`, which has read `tokens` tokens. Their rows are counted from the block's
        first row."""
        start, length = self.slots(*torch.tensor([[block], [tokens]], device=self.device))
        at = block * self.shape.plane
        k, v = (x[at : at + self.shape.rows] for x in (self.k, self.v))
        counts, starts = length.cpu().numpy(), start.cpu().numpy()
        return Stored(k, v, self.positions[block], start, length, counts=counts, starts=starts, like=k[:0])

    def read(self, q: Tensor, k: Tensor, v: Tensor, block: int, tokens: int) -> Tensor:
        """Attend with the next T tokens of the request in `block`, which has read `tokens` tokens before, and store
        their keys and values: q [T, H, D], k and v [T, Hkv, D] -> outputs [T, H, D]. Tokens up to a period's end are
        read together, and slots are evicted at each period's end."""
        out, period = [], self.options.period
        while len(q):
            rows = min(len(q), period - tokens % period)
            out.append(self._read(q[:rows], k[:rows], v[:rows], block, tokens))
            q, k, v, tokens = q[rows:], k[rows:], v[rows:], tokens + rows
            if self.options.ends(tokens):
                self.cut(block, tokens)
        return out[0] if len(out) == 1 else torch.cat(out)

    def _read(self, q: Tensor, k: Tensor, v: Tensor, block: int, tokens: int) -> Tensor:
        stored, rows = self.stored(block, tokens), len(q)
        queries, keys, values = (x.transpose(0, 1)[None] for x in (q, k, v))
        out, _ = _ops.attend(queries, stored, keys, values, self.none, **self.attention)
        position = torch.arange(tokens, tokens + rows, dtype=torch.int32, device=self.device)[None]
        _ops.compact(stored, keys, values, position, self.none, None, stored.len + rows, stored)
        place = self.options.place(tokens)
        new = min(rows, rows + place)  # number of these rows that are among the period's observing rows
        if new > 0:
            self._watch(q[-new:], block, slice(max(place, 0), max(place, 0) + new))
        return out[0]

    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, tokens: Tensor, last: list[tuple[int, int, int]]
    ) -> Tensor:
        """Attend with one new row of each of n requests and store its key and value: q [n, H, D], k and v [n, Hkv, D]
        -> outputs [n, H, D]; at a period's end slots are evicted. last: result of `last_of` for these requests."""
        start, length = self.slots(blocks, tokens)
        held = _ops.Held(self.k, self.v, self.no_positions, start + (blocks * self.shape.plane)[:, None], length)
        position = tokens[:, None].to(torch.int32)
        queries, keys, values = (x.unsqueeze(2) for x in (q, k, v))
        out, _, _ = _ops.decode(queries, keys, values, position, held, **self.attention)
        self.positions[blocks[:, None], start + length] = position.expand_as(length)
        for row, block, before in last:
            if (place := self.options.place(before)) >= 0:
                self._watch(q[row], block, place)
            if self.options.ends(before + 1):
                self.cut(block, before + 1)
        return out[:, 0]

    def _watch(self, q: Tensor, block: int, places: int | slice) -> None:
        """Keep queries [.., H, D] of observing rows in the state of a request. places: their indices among the period's
        observing rows (`VllmOptions.place`)."""
        near = self.shape.near_keys
        for part, own in zip(self.queries, (q[..., :near, :], q[..., near:, :]), strict=True):
            part[block, places] = own

    def cut(self, block: int, tokens: int) -> None:
        """Evict slots of the request in `block`, which has read `tokens` tokens, a multiple of the period."""
        options, heads = self.options, self.shape.kv_heads
        # `slots` counts tokens since the last multiple of the period, which is `tokens` itself: so take one token less,
        # and then add it to the counts.
        stored = self.stored(block, tokens - 1)
        stored.len, stored.counts = stored.len + 1, stored.counts + 1
        slots = np.array([options.slots * heads])
        if (stored.counts.sum(1) > slots).any():
            index, kept = self._chosen(stored, block, tokens, slots)
        else:
            index = torch.arange(int(stored.counts.max()), device=self.device).expand(1, heads, -1)
            index, kept = index.masked_fill(index >= stored.len[..., None], -1), stored.len
        there = index[0] >= 0
        old = (stored.offset[0, :, None] + index[0])[there]
        new = (_starts(kept, options.period)[0, :, None] + torch.arange(index.shape[2], device=self.device))[there]
        for each in stored.buffers:
            each[new] = each[old]
        self.kept[block] = kept[0]

    def _chosen(self, stored: Stored, block: int, tokens: int, keep: np.ndarray) -> tuple[Tensor, Tensor]:
        """(indices [1, Hkv, K] of the slots that stay, -1 after a head's last one; their number [1, Hkv]). keep [1]:
        the number of slots that stay over all heads."""
        policy, none = self.options.policy, self.none
        empty = self.k[:0].expand(1, self.shape.kv_heads, 0, -1)
        call = CallRows(positions=none[None] + tokens - 1, first=none, padding=np.zeros(1, int))
        rows = LayerRows(call, np.array([self.options.slots]), None, None, None, None)
        observers: Any = policy.rows  # a `Rows`, not the name of one, since the policy is built
        ends = protected(policy, observers, self.layer, rows, stored.counts.max(1))
        kv = KV(stored, empty, empty, none, self.attention)
        slots = Slots(self.layer, Heads(ALONE, self.shape.kv_heads), stored.counts, ends, none[None, :0], stored, kv)
        observation = self._observation(stored, block) if self.options.window else None
        choice = cut(policy, slots, observation, keep, order=self.layer)
        return choice.index, _ops.upload(choice.keep, self.device, torch.int32)

    def _observation(self, stored: Stored, block: int) -> Observation:
        """The observation by the period's last rows, with their attention outputs over the slots that each row sees."""
        window, none = self.options.window, self.none
        q = torch.cat([part[block] for part in self.queries], 1).transpose(0, 1)[None]
        before = stored.len - window
        own = stored.offset[..., None] + before[..., None] + torch.arange(window, device=self.device)
        held = _ops.Held(stored.k, stored.v, offset=stored.offset, len=before)
        out, lse = _ops.attend(q, held, stored.k[own], stored.v[own], none, **self.attention)
        return Observation((Observers(q, none, none, True, lse, out),))


def last_of(options: VllmOptions, blocks: list[int], tokens: list[int]) -> list[tuple[int, int, int]]:
    """(index in the step, block, number of tokens read before) for those decoded tokens that observe in their period,
    or that end it. blocks, tokens: the blocks of a step's requests, and the tokens that the decoding ones have read."""
    # After these requests' blocks, `blocks` has those of the step's other requests
    rows = zip(range(len(tokens)), blocks, tokens, strict=False)
    return [row for row in rows if options.place(row[2]) >= 0 or options.ends(row[2] + 1)]


def _starts(kept: Tensor, period: int) -> Tensor:
    """The first row of each head in its block, int64 [n, Hkv]. kept [n, Hkv]: the number of slots that each head kept
    at the last eviction."""
    ends = (kept.long() + period).cumsum(1)
    return ends - kept - period
