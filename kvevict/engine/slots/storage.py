"""Storage of a layer's slots: ragged, in flat buffers with a little room per head."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from ... import _ops
from ..._ops import Held
from . import host
from .pool import Pool

ROOM = 64  # free rows per head after an eviction, so that decoding appends without moving anything


@dataclass
class Storage(Held):
    """The slots of a layer; batch rows and kv heads may hold different numbers. All None before the first tokens.

    A head's rows are in ascending position, with room for `capacity[b,h]`. A method that changes the slots returns the
    storage to use from then on. It may have the same buffers, so do not use the old one any more.
    """

    counts: np.ndarray = None  # type: ignore[assignment]  # len on the host
    capacity: np.ndarray = None  # type: ignore[assignment]  # [B, Hkv] on the host
    room: int = 0  # free rows of the fullest head
    shared: bool = False  # forks read the buffers, so the slots in them must not move
    starts: np.ndarray = None  # type: ignore[assignment]  # `offset` on the host
    pool: Pool | None = None  # lends the rows that the slots need next; None: new buffers do
    regions: tuple = ()  # the `Region` of each batch row; none outside a pool

    @classmethod
    def empty(cls, keys, pool=None):
        """An empty storage for keys [B, Hkv, *, D] of the same shape, dtype and device as these."""
        batch, heads, _, dim = keys.shape
        flat, none = keys.new_empty(0, dim), np.zeros((batch, heads), np.int64)
        return replace(cls.packed(flat, flat.clone(), flat.new_empty(0, dtype=torch.int32), none), pool=pool)

    @classmethod
    def joined(cls, storages):
        """The batch rows of all storages: where they lie, if that is one pool, else moved into one place."""
        first = storages[0]
        counts = np.concatenate([each.counts for each in storages])
        capacity = np.concatenate([each.capacity for each in storages])
        if any(each.k is not first.k for each in storages):
            into, row = first._blank(capacity), 0
            for each in storages:
                mine = slice(row, row + len(each.counts))
                to = replace(into, offset=into.offset[mine], capacity=capacity[mine])
                to._filled(each, None, each.counts)
                row += len(each.counts)
            return into._holding(torch.cat([each.len for each in storages]), counts)
        rows = replace(
            first, offset=torch.cat([each.offset for each in storages]), capacity=capacity,
            starts=np.concatenate([each.starts for each in storages]), shared=any(each.shared for each in storages),
            regions=sum((each.regions for each in storages), ()),
        )  # fmt: skip
        return rows._holding(torch.cat([each.len for each in storages]), counts)

    def __reduce_ex__(self, protocol):
        return object.__reduce_ex__(self._alone(), protocol)

    @classmethod
    def packed(cls, k, v, pos, counts):
        """A storage of flat buffers without room between heads; counts [B, Hkv] on the host."""
        return _laid_out(cls(k, v, pos), counts)._holding(host.upload(counts, k.device, torch.int32), counts)

    device = property(lambda self: self.k.device)

    # -- changes of the slots ---------------------------------------------------------------------------------------

    def append(self, k, v, pos, first, padding, expected=0):
        """A storage with new columns first[b].. of k, v [B, Hkv, S, D], pos [B, S] after each head's slots; amortised
        O(S).

        padding    `first` on the host
        expected   slots per head that a read is going to store; a growth makes room for them
        """
        counts = self.counts + (k.shape[2] - padding)[:, None]
        into = self if (counts <= self.capacity).all() else self._blank(self.grown(counts, expected))
        return into._filled(self, None, counts, k, v, pos, first)

    def keep(self, index, keep, *new):
        """A storage with only slots index [B, Hkv, K] of [stored | new], ascending; keep[b,h] of them, on the host.

        new   k, v [B, Hkv, S, D], pos [B, S], first [B]; none of them without new columns
        """
        wanted = keep + ROOM
        if self.shared or (wanted > self.capacity).any() or self.capacity.sum() > 2 * wanted.sum():
            return self.moved(wanted, index, keep, *new)
        return self._filled(self, index, keep, *new)

    def decode(self, q, k, v, pos, expected=0, **options):
        """(out, lse, probs) as `_ops.decode` gives them, and the storage with the new row."""
        into = self if self.room else self.moved(self.grown(self.counts, expected))
        result = _ops.decode(q, k, v, pos, into, **options)
        more = into.len + 1, into.centre, into.counts + 1, into.capacity, into.room - 1, into.shared
        return result, Storage(into.k, into.v, into.pos, into.offset, *more, into.starts, into.pool, into.regions)

    def crop(self, count: int):
        """A storage without the last `count` slots of every head."""
        own = self.copy_on_write()  # the next tokens overwrite the cropped slots
        return own._holding((own.len - count).clamp_min(0), np.maximum(own.counts - count, 0))

    def rows(self, chosen):
        """A storage with batch rows chosen [N], in any order, repeats allowed. Rows of a pool stay where they are,
        unless they are repeated; so do at least half of the rows of other buffers."""
        at = chosen.tolist()
        rows = self._at(chosen, at)
        stays = len(set(at)) == len(at) and not self.shared and (self.regions or 2 * len(at) >= len(self.counts))
        return rows._holding(rows.len, rows.counts) if stays else rows.moved(rows.capacity)

    def aliased(self, chosen):
        """Batch rows chosen [N] in the same buffers, to be read only: a row that is named twice is stored once."""
        return replace(self._at(chosen, chosen.tolist()), room=0, shared=True)

    def _at(self, chosen, at):
        """Batch rows chosen [N], the list `at` on the host, in the same buffers."""
        rows = replace(self, offset=self.offset[chosen], len=self.len[chosen], counts=self.counts[at])
        regions = tuple(self.regions[row] for row in at) if self.regions else ()
        return replace(rows, capacity=self.capacity[at], starts=self.starts[at], regions=regions)

    def moved(self, capacity, index=None, keep=None, *new):
        """New buffers with room for capacity [B, Hkv] that hold keep[b,h] slots `index`, or all slots."""
        return self._blank(capacity)._filled(self, index, self.counts if keep is None else keep, *new)

    def copy_on_write(self):
        """A storage with buffers that no fork reads, so that slots may be moved and overwritten there."""
        return self.moved(self.capacity) if self.shared else self

    def followed_by(self, other):
        """This storage, which has room for them, with the slots of another one after its slots."""
        after = replace(self, offset=self.offset + self.len)
        after._filled(other, None, other.counts)
        return self._holding(self.len + other.len, self.counts + other.counts)

    def gathered(self):
        """All slots in one place, for reading."""
        return self

    def grown(self, counts, expected=0):
        """Capacity [B, Hkv] for counts and an eighth more, so that appending is O(1) on average."""
        return np.maximum(self.capacity, np.maximum(counts + np.maximum(counts // 8, ROOM), expected))

    def _blank(self, capacity):
        """New, empty buffers of a capacity."""
        rows = int(capacity.sum())
        region = None if self.pool is None else self.pool.lend(rows, self)
        if region is not None:
            lent = Storage(*region.buffers, pool=self.pool, regions=(region,) * len(capacity))
            return _laid_out(lent, capacity, region.start)
        with torch.inference_mode(False):  # a cache filled in inference mode can be written to outside of it
            flat = Storage(*(t.new_empty(rows, *t.shape[1:]) for t in (self.k, self.v, self.pos)), pool=self.pool)
        return _laid_out(flat, capacity)

    def _filled(self, source, index, counts, *new):
        """These buffers with counts [B, Hkv] slots `index` (None: the first ones) of [source | new]."""
        if not new:
            batch, heads = counts.shape
            none = source.k.new_empty(batch, heads, 0, source.k.shape[1])
            new = none, none, source.pos.new_empty(batch, 0), source.pos.new_zeros(batch)
        length = host.upload(counts, self.device, torch.int32)
        _ops.compact(source, *new, index, length, self)
        return self._holding(length, counts)

    def _alone(self):
        """These slots outside the pool, for a copy or a file of the storage."""
        return replace(self, pool=None).moved(self.capacity) if self.regions else self

    def _holding(self, length, counts):
        room = int((self.capacity - counts).min()) if counts.size else 0
        return replace(self, len=length, counts=counts, room=room)

    # -- the stored slots -------------------------------------------------------------------------------------------

    def within(self, begin, length):
        """Only the slots begin .. begin + length - 1 [B, Hkv], to be read."""
        return replace(self, offset=self.offset + begin, len=length)

    def longest(self) -> int:
        """Slots of the fullest head."""
        return int(self.counts.max()) if self.counts.size else 0

    def live_bytes(self) -> int:
        """Bytes of the stored keys and values: 2 * bytes * d * sum(len)."""
        return 0 if self.k is None else 2 * self.k.element_size() * self.k.shape[1] * int(self.counts.sum())

    def padded_bytes(self) -> int:
        """`live_bytes` if every head were padded to the fullest."""
        return 2 * self.k.element_size() * self.k.shape[1] * self.counts.size * self.longest()

    def tensors(self) -> tuple:
        """All tensors that take up memory; of a pool as many rows as are lent."""
        if self.k is None:
            return ()
        lent = sum(region.rows for region in set(self.regions)) if self.regions else None
        return self.k[:lent], self.v[:lent], self.pos[:lent], self.offset, self.len

    def segments(self):
        """(b, h, slice of the flat buffers) of every head's slots."""
        lens = self.counts.tolist()
        for b, row in enumerate(self.starts.tolist()):
            for h, start in enumerate(row):
                yield b, h, slice(start, start + lens[b][h])

    def positions(self) -> list:
        """Positions of the slots by row and head: int32 copies."""
        heads = [[None] * self.len.shape[1] for _ in range(self.len.shape[0])]
        for b, h, rows in self.segments():
            heads[b][h] = self.pos[rows].clone()
        return heads

    def dense(self, name):
        """Copy [B, Hkv, longest, D] of "k" or "v", zeros after shorter heads; None before the first tokens."""
        flat = getattr(self, name)
        if flat is None:
            return None
        dense = flat.new_zeros(*self.len.shape, self.longest(), flat.shape[1])
        for b, h, rows in self.segments():
            dense[b, h, : rows.stop - rows.start] = flat[rows]
        return dense


def _laid_out(storage, capacity, start=0):
    """Heads lie one after the other, from row `start` on."""
    starts = start + (capacity.cumsum() - capacity.ravel()).reshape(capacity.shape)
    return replace(storage, capacity=capacity, starts=starts, offset=host.upload(starts, storage.device))
