"""Changes of a layer's slots, in flat buffers with a little room per head: append, keep, fork, join."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...ops import _ops
from ...policy import kv
from .host import Coming, transfer
from .mapped import Files
from .pool import Pool
from .stored import Stored

ROOM = 64  # free rows per head after an eviction, so that decoding appends without moving anything
ROOM_TO_REPLAY = 256  # the same where slots move under compiled=True: what is recorded ends there
OF_ROWS = "offset", "len", "counts", "capacity", "starts", "centre", "centred"  # fields [B, ..]


@dataclass
class Storage(Stored):
    """The slots of a layer, with room for `capacity[b,h]` of a head. All None before the first tokens.

    A method that changes the slots returns the storage to use from then on. It may have the same buffers, so do not use
    the old one any more. A decoded token alone changes a storage: it is counted (`tick`) before it is written
    (`decode`).

    A fork's `prefix` lies in buffers that other storages read too and none writes to. Several batch rows may share one
    row of a prefix.

    A storage is `far` if its prefix lies in the host's memory and the slots after it on another device. It is read as a
    copy of all slots on that device, which lies there inside `here`, and elsewhere for one use.
    """

    capacity: np.ndarray = None  # type: ignore[assignment]  # [B, Hkv] on the host
    pool: Pool | Files | None = None  # lends the rows that the slots need next; None: new buffers do
    before: Any = field(default=None, init=False)  # these slots without the one that was counted last
    table: Any = field(default=None, init=False)  # a weak reference to the `Table` that holds the counts
    coming: Coming | None = field(default=None, init=False)  # the copy of all slots, of a far storage

    @classmethod
    def empty(cls, keys: Tensor, pool: Pool | Files | None = None, kinds: kv.Kinds = kv.KINDS["model"]) -> Storage:
        """An empty storage for keys [B, Hkv, *, D] of the same shape, dtype and device as these."""
        batch, heads, _, dim = keys.shape
        flat, none = keys.new_empty(0, dim), np.zeros((batch, heads), np.int64)
        k, v = (kv.buffer(each, flat) for each in kinds)
        centre = None if kinds[0] == kv.MODEL else keys.new_zeros(batch, heads, dim, dtype=torch.float32)
        made = cls.packed(k, v, flat.new_empty(0, dtype=torch.int32), none, flat, centre, kinds)
        return replace(made, pool=pool, centred=np.zeros(batch, bool))

    @classmethod
    def joined(cls, storages: Sequence[Storage]) -> Storage:
        """Concatenate batch rows: without a copy if all lie in one pool, else in new buffers."""
        storages = [each.whole() if each.far else each for each in storages]
        first, prefix = storages[0], next((each.prefix for each in storages if each.prefix is not None), None)
        if prefix is not None:
            prefix = cls.joined([each.prefix or prefix._no_slots(len(each.counts)) for each in storages])
        fields = {name: together([getattr(each, name) for each in storages]) for name in OF_ROWS}
        rows = replace(first, **fields, regions=sum((each.regions for each in storages), ()), prefix=prefix)
        if all(each.k is first.k for each in storages):
            return rows
        into, row = rows._blank(rows.capacity), 0
        for each in storages:
            mine = [*range(row, row + len(each.counts))]
            into.aliased(torch.tensor(mine, device=into.device), mine)._filled(each, None, each.counts)
            row += len(each.counts)
        return into

    def __reduce_ex__(self, protocol: Any) -> Any:
        apart = replace(self, pool=None).moved(self.capacity) if self.regions else self  # out of its pool
        return object.__reduce_ex__(apart, protocol)

    def __getstate__(self) -> dict:
        return self.__dict__ | dict(before=None, table=None, coming=None)

    @classmethod
    def packed(
        cls, k: Tensor, v: Tensor, pos: Tensor, counts: np.ndarray, like: Tensor | None = None,
        centre: Tensor | None = None, kinds: kv.Kinds = kv.KINDS["model"],
    ) -> Storage:  # fmt: skip
        """A storage of flat buffers without room between heads; counts [B, Hkv] on the host."""
        like, centred = k[:0] if like is None else like, counts.any(1)
        flat = cls(k, v, pos, centre=centre, k_kind=kinds[0], v_kind=kinds[1], like=like, centred=centred)
        return _laid_out(flat, counts)._holding(_ops.upload(counts, k.device, torch.int32), counts)

    @property
    def room(self) -> int:
        """Free rows of the fullest head."""
        return int((self.capacity - self.counts).min()) if self.counts.size else 0

    # -- changes of the slots ---------------------------------------------------------------------------------------

    def append(
        self, k: Tensor, v: Tensor, pos: Tensor, first: Tensor, padding: np.ndarray, expected: int | np.ndarray = 0
    ) -> Storage:
        """A storage with new columns first[b].. of k, v [B, Hkv, S, D], pos [B, S] after each head's slots; amortised
        O(S).

        padding    `first` on the host
        expected   slots per head, the prefix's too, that a read is going to store, a number or [B, 1]; a growth makes
                   room for them
        """
        counts = self.counts + (k.shape[2] - padding)[:, None]
        if (counts <= self.capacity).all():
            return self._refilled(None, counts, k, v, pos, first)
        return self._blank(self.grown(counts, expected))._filled(self, None, counts, k, v, pos, first)

    def keep(self, index: Tensor, keep: np.ndarray, *new: Tensor, computed: bool = False) -> Storage:
        """A storage with only slots index [B, Hkv, K] of [stored | new], ascending; keep[b,h] of them, on the host.

        new        k, v [B, Hkv, S, D], pos [B, S], first [B]; none of them without new columns
        computed   packed slots become slots as computed
        """
        wanted = keep + ROOM
        if computed and self.kinds != kv.KINDS["model"]:
            into = self.none(kv.KINDS["model"])._blank(wanted)
            return into._filled(self.gathered(), index, keep, *new)
        fits = self.prefix is None and (wanted <= self.capacity).all()
        if fits and self.capacity.sum() <= 2 * wanted.sum():
            return self._refilled(index, keep, *new)
        return self.gathered().moved(wanted, index, keep, *new)

    def with_room(self, expected: int = 0, room: int = ROOM) -> Storage:
        """A storage with these slots, and room for one more in every head; if it is another one, for `room` or more.
        expected: as in `append`."""
        return self if self.room else self.moved(self.grown(self.counts + 1, expected, room))

    def tick(self) -> None:
        """Count one more slot in every head, which the next `decode` writes. A `Table` does so for many layers."""
        self.before = self.held(self.len)
        self.len, self.counts = self.len + 1, self.counts + 1

    def decode(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, **options: Any) -> Any:
        """(out, lse, probs) as `_ops.decode` gives them, with the new row in the slot that was counted last."""
        return _ops.decode(q, k, v, pos, self.before, prefix=self.prefix, **options)

    def crop(self, count: int) -> Storage:
        """A storage without the last `count` slots of every head. The next tokens overwrite these, but not slots of a
        prefix."""
        if self.prefix is not None and (self.counts < np.minimum(count, self.total_counts)).any():
            return self.gathered().crop(count).as_prefix()
        return self._holding((self.len - count).clamp_min(0), np.maximum(self.counts - count, 0))

    def rows(self, chosen: Tensor) -> Storage:
        """A storage with batch rows chosen [N], in any order, repeats allowed. Rows of a prefix stay in place, and
        those of a pool, unless they are repeated; so do at least half of the rows of other buffers."""
        at = chosen.tolist()
        rows = self.aliased(chosen.to(self.device), at)
        stays = len(set(at)) == len(at) and (self.regions or 2 * len(at) >= len(self.counts))
        return rows if stays else rows.moved(rows.capacity)

    def aliased(self, chosen: Tensor, at: list) -> Storage:
        """View batch rows chosen [N], the list `at` on the host, in the same buffers."""
        own = {name: getattr(self, name) for name in OF_ROWS}
        fields: Any = {name: x if x is None else x[chosen if isinstance(x, Tensor) else at] for name, x in own.items()}
        regions, prefix = tuple(self.regions[row] for row in at) if self.regions else (), None
        if self.prefix is not None and self.prefix.total_counts[at].any():
            prefix = self.prefix.aliased(chosen.to(self.prefix.device), at)
        return replace(self, **fields, regions=regions, prefix=prefix)

    def moved(
        self, capacity: np.ndarray, index: Tensor | None = None, keep: np.ndarray | None = None, *new: Tensor
    ) -> Storage:
        """New buffers with room for capacity [B, Hkv] that hold keep[b,h] slots `index`, or all slots."""
        return self._blank(capacity)._filled(self, index, self.counts if keep is None else keep, *new)

    def repacked(self, kinds: kv.Kinds, centre: Tensor, known: np.ndarray) -> Storage:
        """Pack these slots anew, in other kinds, around centres as in `centred_at`."""
        into = self.none(kinds)
        if into.centre is not None:
            into = into.centred_at(centre, known)
        return into._blank(self.capacity)._filled(self, None, self.counts)

    # -- forks ------------------------------------------------------------------------------------------------------

    def forked(self) -> Storage:
        """A storage that begins with these slots and goes on apart; from here on they may not move here either. Only
        slots after a prefix are copied."""
        apart = replace(self, pool=self._memory)  # what is read and written from here on is not an archive's
        return apart.as_prefix() if self.prefix is None else apart.moved(self.capacity)

    def as_prefix(self) -> Storage:
        """No slots, after these as a prefix; the storage itself if it has one."""
        if self.prefix is not None:
            return self
        prefix = replace(self, pool=self._memory, len=self.len.clone(), counts=self.counts.copy())  # this one goes on
        return self.blank(self.pool, prefix)

    def blank(self, pool: Pool | Files | None, prefix: Storage | None = None) -> Storage:
        """An empty storage for slots of the same kind."""
        none = 0 * self.counts
        return replace(self, pool=pool, prefix=prefix)._blank(none)._holding(torch.zeros_like(self.len), none)

    def none(self, kinds: kv.Kinds) -> Storage:
        """An empty storage for these heads' slots in other kinds, without centres."""
        return Storage.empty(self.like[None, None].expand(*self.counts.shape, -1, -1), self.pool, kinds)

    def fetch(self) -> None:
        """Begin to copy all slots of a far storage to its device, for `gathered`."""
        if self.far and self.coming is None:
            self.coming = Coming(self, self.total_counts)

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """Inside, what reads the slots of a far storage reads one copy of them."""
        self.fetch()
        try:
            yield
        finally:
            self.coming = None

    def gathered(self) -> Storage:
        """All slots in one place, for reading: the prefix itself while there are no others."""
        if self.far:
            return (self.coming or Coming(self, self.total_counts)).slots()
        return self.whole() if self.prefix is None or self.counts.any() else self.prefix.gathered()

    def whole(self) -> Storage:
        """All slots without a prefix, which is copied."""
        if self.prefix is None:
            return self
        if self.far:
            return Coming(self, self.grown(self.total_counts)).slots()
        before = self.prefix.whole()
        return before.moved(before.grown(self.total_counts)).followed_by(self)

    _memory = property(lambda self: None if isinstance(self.pool, Files) else self.pool)

    def _no_slots(self, rows: int) -> Storage:
        """So many batch rows without a slot, in the same buffers."""
        first = self.aliased(torch.zeros(rows, dtype=torch.int64, device=self.device), [0] * rows)
        none = 0 * first.counts
        return replace(first, len=0 * first.len, counts=none, capacity=none, starts=none, prefix=None)

    def followed_by(self, other: Storage) -> Storage:
        """Append the slots of another storage; this one must have room for them."""
        after = replace(self, offset=self.offset + self.len, starts=self.starts + self.counts)
        filled = after._filled(other, None, other.counts)
        return self._holding(self.len + filled.len, self.counts + other.counts)

    def with_all(self, other: Storage, expected: int | np.ndarray = 0) -> Storage:
        """A storage with the slots of another one, which has no prefix, after these. expected: as in `append`."""
        counts = self.counts + other.counts
        into = self if (counts <= self.capacity).all() else self.moved(self.grown(counts, expected))
        return into.followed_by(other)

    def grown(self, counts: np.ndarray, expected: int | np.ndarray = 0, room: int = ROOM) -> np.ndarray:
        """Capacity [B, Hkv] for the counts that are expected, as in `append`; if these are fewer, for an eighth
        more than counts, so that appending is O(1) on average."""
        own = expected if self.prefix is None else expected - self.prefix.total_counts
        return np.maximum(self.capacity, np.where(counts <= own, own, counts + np.maximum(counts // 8, room)))

    def _blank(self, capacity: np.ndarray) -> Storage:
        """This storage, to be filled: new buffers of a capacity."""
        rows = int(capacity.sum())
        lent = None if self.pool is None else self.pool.lend(rows, self)
        if lent is not None:
            (k, v, pos), start, regions = lent.buffers, lent.start, (lent,) * len(capacity)
        else:
            start, regions = 0, ()
            with torch.inference_mode(False):  # a cache filled in inference mode can be written to outside of it
                pinned = self.on_host and torch.cuda.is_available()
                k, v, pos = (t.new_empty(rows, *t.shape[1:], pin_memory=pinned) for t in self.buffers)
        return _laid_out(replace(self, k=k, v=v, pos=pos, regions=regions), capacity, start)

    def _refilled(self, index: Tensor | None, counts: np.ndarray, *new: Tensor) -> Storage:
        """This storage, with counts [B, Hkv] slots `index` of [stored | new]; its counts stay where they lie."""
        filled = self._filled(self, index, counts, *new)
        with torch.inference_mode(self.len.is_inference()):
            self.len.copy_(filled.len)
        self.counts[...], self.centred, self.coming = counts, filled.centred, None
        table = None if self.table is None else self.table()
        if table is not None:
            table.room = min(table.room, self.room)
        return self

    def _filled(self, source: Storage, index: Tensor | None, counts: np.ndarray, *new: Any) -> Storage:
        """Fill these buffers with counts [B, Hkv] slots `index` (None: the first ones) of [source | new]. From another
        memory: with all of source."""
        length = _ops.upload(counts, self.device, torch.int32)
        if source.on_host != self.on_host:
            transfer(self, source)
        else:
            if not new:
                batch, heads = counts.shape
                none = source.like.new_empty(batch, heads, 0, source.dim)
                new = (none, none, source.pos.new_empty(batch, 0), source.pos.new_zeros(batch))
            k, v, pos, first = new
            _ops.compact(source, k, v, pos, first, index, length, self)
        return replace(self, centred=self.centred | counts.any(1))._holding(length, counts)

    def _holding(self, length: Tensor, counts: np.ndarray) -> Storage:
        return replace(self, len=length, counts=counts.copy())  # layers that share a choice count apart


def _laid_out(storage: Storage, capacity: np.ndarray, start: int = 0) -> Storage:
    """Heads lie one after the other, from row `start` on."""
    starts = start + (capacity.cumsum() - capacity.ravel()).reshape(capacity.shape)
    return replace(storage, capacity=capacity, starts=starts, offset=_ops.upload(starts, storage.device))


def together(parts: list) -> Any:
    """A field [B, ..] of several storages or layers for the rows of all; None if it is None."""
    return None if parts[0] is None else torch.cat(parts) if isinstance(parts[0], Tensor) else np.concatenate(parts)
