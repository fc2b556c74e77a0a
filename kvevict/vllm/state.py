"""A layer's part of the states of requests, as it lies in vLLM's cache, and its cut at a period's end.

A block of vLLM's cache is a state; it has two planes of equal size. The first has the rows of keys and some of the last
queries, the second the rows of values, the position of every row, the number of slots that each head kept at the last
cut, and the other queries. Heads have unequal numbers of slots where they compete for them: head h begins where the
kept slots and the period of head h - 1 end, so all heads' slots fit whoever wins.
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
    """Sizes of one layer's part of a state."""

    kv_heads: int
    dim: int
    dtype: torch.dtype
    options: VllmOptions

    heads = property(lambda self: self.kv_heads * self.options.group)
    rows = property(lambda self: self.kv_heads * (self.options.slots + self.options.period))
    row_bytes = property(lambda self: self.dim * self.dtype.itemsize)

    @property
    def numbers(self) -> int:
        """Rows of the second plane that the positions and the heads' slot counts take."""
        return -(-4 * (self.rows + self.kv_heads) // self.row_bytes)

    @property
    def near_keys(self) -> int:
        """Query heads whose last queries lie in the first plane, so that the planes are about equally full."""
        window = max(self.options.window, 1)
        return min(self.heads, -(-(self.options.window * self.heads + self.numbers) // (2 * window)))

    @property
    def plane(self) -> int:
        """Rows of a plane."""
        queries = [self.options.window * heads for heads in (self.near_keys, self.heads - self.near_keys)]
        return self.rows + max(queries[0], self.numbers + queries[1])

    @property
    def plane_bytes(self) -> int:
        return self.plane * self.row_bytes


class States:
    """Views of the layer's part of all states: block b has rows b * plane .. of `k` and `v`."""

    def __init__(self, cache: Tensor, shape: StateShape, layer: int, attention: dict) -> None:
        """cache: [blocks, 2, 1, plane * dim], of which the planes [blocks, plane * dim] are dense; attention: `scale`,
        `softcap` and `sinks` of the layer."""
        self.shape, self.layer, self.attention, self.options = shape, layer, attention, shape.options
        rows, dim, near, window = shape.rows, shape.dim, shape.near_keys, shape.options.window
        planes = [cache[:, i, 0].unflatten(1, (-1, dim)) for i in range(2)]  # [blocks, plane, dim]
        self.k, self.v = (plane.flatten(0, 1) for plane in planes)
        assert self.k.data_ptr() == planes[0].data_ptr() and self.v.data_ptr() == planes[1].data_ptr(), cache.stride()
        numbers = planes[1].flatten(1)[:, rows * dim :].view(torch.int32)
        self.positions = numbers[:, :rows]  # [blocks, rows], of each row of a state
        self.kept = numbers[:, rows : rows + shape.kv_heads]  # [blocks, Hkv] slots after the last cut
        places = (planes[0], rows, near), (planes[1], rows + shape.numbers, shape.heads - near)
        self.queries = [  # [blocks, window, heads, dim] of the last rows of a period
            plane[:, first : first + window * heads].unflatten(1, (window, heads)) for plane, first, heads in places
        ]
        self.device = cache.device
        self.none = torch.zeros(1, dtype=torch.int32, device=self.device)  # no padding
        self.no_positions = torch.zeros(len(self.k), dtype=torch.int32, device=self.device)

    def slots(self, blocks: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(first row int64, slots int32) [n, Hkv] of the heads of requests that have so many tokens [n] stored, without
        those of other blocks before them."""
        period = self.options.period
        kept = torch.where(tokens[:, None] < period, 0, self.kept[blocks])  # a block's last request left others
        return _starts(kept, period), kept + (tokens % period)[:, None].to(torch.int32)

    def stored(self, block: int, tokens: int) -> Stored:
        """The slots of one request, whose rows are counted from its block's first."""
        start, length = self.slots(*torch.tensor([[block], [tokens]], device=self.device))
        at = block * self.shape.plane
        k, v = (x[at : at + self.shape.rows] for x in (self.k, self.v))
        counts, starts = length.cpu().numpy(), start.cpu().numpy()
        return Stored(k, v, self.positions[block], start, length, counts=counts, starts=starts, like=k[:0])

    def read(self, q: Tensor, k: Tensor, v: Tensor, block: int, tokens: int) -> Tensor:
        """Attend with the next rows of a request of so many tokens, [T, heads, D], and store them: [T, H, D]. Rows up
        to a period's end are read together, and then slots are evicted."""
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
        new = min(rows, rows + place)  # rows of the period's window
        if new > 0:
            self._watch(q[-new:], block, slice(max(place, 0), max(place, 0) + new))
        return out[0]

    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, tokens: Tensor, last: list[tuple[int, int, int]]
    ) -> Tensor:
        """As `read`, with one row of each of several requests, [n, heads, D]: [n, H, D]. last: (row, block, tokens
        before) of those near a period's end, by `last_of`."""
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
        """Keep queries [.., H, D] at `places` of a request's window."""
        near = self.shape.near_keys
        for part, own in zip(self.queries, (q[..., :near, :], q[..., near:, :]), strict=True):
            part[block, places] = own

    def cut(self, block: int, tokens: int) -> None:
        """Evict slots of a request of so many tokens, which are a multiple of the period."""
        options, heads = self.options, self.shape.kv_heads
        # One token less: the period's slots are all there, and `slots` counts them from the cut before.
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
        """The indices [1, Hkv, K] of the slots that stay, -1 past a head's last, and their number [1, Hkv]."""
        policy, none = self.options.policy, self.none
        empty = self.k[:0].expand(1, self.shape.kv_heads, 0, -1)
        call = CallRows(positions=none[None] + tokens - 1, first=none, padding=np.zeros(1, int))
        rows = LayerRows(call, np.array([self.options.slots]), None, None, None, None)
        observers: Any = policy.rows  # built: not the name of rows
        ends = protected(policy, observers, self.layer, rows, stored.counts.max(1))
        kv = KV(stored, empty, empty, none, self.attention)
        slots = Slots(self.layer, Heads(ALONE, self.shape.kv_heads), stored.counts, ends, none[None, :0], stored, kv)
        observation = self._observation(stored, block) if self.options.window else None
        choice = cut(policy, slots, observation, keep, order=self.layer)
        return choice.index, _ops.upload(choice.keep, self.device, torch.int32)

    def _observation(self, stored: Stored, block: int) -> Observation:
        """The period's last rows, with their outputs over the slots that each sees."""
        window, none = self.options.window, self.none
        q = torch.cat([part[block] for part in self.queries], 1).transpose(0, 1)[None]
        before = stored.len - window
        own = stored.offset[..., None] + before[..., None] + torch.arange(window, device=self.device)
        held = _ops.Held(stored.k, stored.v, offset=stored.offset, len=before)
        out, lse = _ops.attend(q, held, stored.k[own], stored.v[own], none, **self.attention)
        return Observation((Observers(q, none, none, True, lse, out),))


def last_of(options: VllmOptions, blocks: list[int], tokens: list[int]) -> list[tuple[int, int, int]]:
    """(row, block, tokens before) of decoded rows that will observe, or that end a period."""
    rows = zip(range(len(tokens)), blocks, tokens, strict=False)  # other requests' blocks follow
    return [row for row in rows if options.place(row[2]) >= 0 or options.ends(row[2] + 1)]


def _starts(kept: Tensor, period: int) -> Tensor:
    """int64 [n, Hkv] the first row of each head, of heads that kept so many slots at the last cut."""
    ends = (kept.long() + period).cumsum(1)
    return ends - kept - period
