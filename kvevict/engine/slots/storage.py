"""Storage of a layer's slots: ragged, in flat buffers with a little room per head."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ... import _ops
from ..._ops import Held
from ...policy import kv
from .host import Coming, transfer
from .mapped import Files
from .pool import Pool

ROOM = 64  # free rows per head after an eviction, so that decoding appends without moving anything
ROOM_TO_REPLAY = 256  # the same where slots move under compiled=True: what is recorded ends there


@dataclass
class Storage(Held):
    """The slots of a layer; batch rows and kv heads may hold different numbers. All None before the first tokens.

    A head's rows are in ascending position, with room for `capacity[b,h]`. A method that changes the slots returns the
    storage to use from then on. It may have the same buffers, so do not use the old one any more. A decoded token alone
    changes a storage: it is counted (`tick`) before it is written (`decode`).

    A fork's slots begin with a `prefix`, in buffers that other storages read too and none writes to; the other fields
    are of the slots after it. Several batch rows may share one row of a prefix.

    A storage is `far` if its prefix lies in the host's memory and the slots after it on another device. It is read as a
    copy of all slots on that device, which lies there inside `here`, and elsewhere for one use.
    """

    counts: np.ndarray = None  # type: ignore[assignment]  # len on the host
    capacity: np.ndarray = None  # type: ignore[assignment]  # [B, Hkv] on the host
    starts: np.ndarray = None  # type: ignore[assignment]  # `offset` on the host
    pool: Pool | Files | None = None  # lends the rows that the slots need next; None: new buffers do
    regions: tuple = ()  # the `Region` (`Lent`) of each batch row; none outside a pool
    like: Tensor = None  # type: ignore[assignment]  # [0, D] of the dtype of new keys and values
    centred: Any = None  # bool [B] rows with a centre, if keys are packed
    prefix: Any = None  # the `Storage` of the slots before these; one in the host's memory may have a prefix itself
    on_host: bool = False  # in the host's memory, for a layer on another device; pinned there if that is a GPU
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
        first, prefix = storages[0], None
        if any(each.prefix is not None for each in storages):
            prefix = cls.joined([each._no_slots() if each.prefix is None else each.prefix for each in storages])
        counts = np.concatenate([each.counts for each in storages])
        capacity = np.concatenate([each.capacity for each in storages])
        centre = None if first.centre is None else torch.cat([each.centre for each in storages])
        common: Any = dict(centre=centre, centred=np.concatenate([each.centred for each in storages]), prefix=prefix)
        if any(each.k is not first.k for each in storages):
            into, row = replace(first._blank(capacity), **common), 0
            for each in storages:
                mine = slice(row, row + len(each.counts))
                at: Any = dict(offset=into.offset[mine], capacity=capacity[mine])
                to = replace(into, **at, centre=each.centre, centred=each.centred)
                to._filled(each, None, each.counts)
                row += len(each.counts)
            return into._holding(torch.cat([each.len for each in storages]), counts)
        rows = replace(
            first, offset=torch.cat([each.offset for each in storages]), capacity=capacity,
            starts=np.concatenate([each.starts for each in storages]),
            regions=sum((each.regions for each in storages), ()), **common,
        )  # fmt: skip
        return rows._holding(torch.cat([each.len for each in storages]), counts)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return object.__reduce_ex__(self._alone(), protocol)

    def __getstate__(self) -> dict:
        return self.__dict__ | dict(before=None, table=None, coming=None)

    @classmethod
    def packed(
        cls,
        k: Tensor,
        v: Tensor,
        pos: Tensor,
        counts: np.ndarray,
        like: Tensor | None = None,
        centre: Tensor | None = None,
        kinds: kv.Kinds = kv.KINDS["model"],
    ) -> Storage:
        """A storage of flat buffers without room between heads; counts [B, Hkv] on the host."""
        like, centred = k[:0] if like is None else like, counts.any(1)
        flat = cls(k, v, pos, centre=centre, k_kind=kinds[0], v_kind=kinds[1], like=like, centred=centred)
        return _laid_out(flat, counts)._holding(_ops.upload(counts, k.device, torch.int32), counts)

    buffers = property(lambda self: (self.k, self.v, self.pos))  # a row per slot
    device = property(lambda self: self.k.device)
    dim = property(lambda self: self.like.shape[1])
    kinds = property(lambda self: (self.k_kind, self.v_kind))
    far = property(lambda self: self.prefix is not None and self.prefix.on_host and not self.on_host)
    is_centred = property(lambda self: self.centre is None or bool(self.centred.all()))

    @property
    def total_counts(self) -> np.ndarray:
        """[B, Hkv] on the host: the prefix's slots too."""
        return self.counts if self.prefix is None else self.prefix.total_counts + self.counts

    @property
    def total_len(self) -> Tensor:
        """`total_counts`, int32 on the device."""
        if self.far:
            return _ops.upload(self.total_counts, self.device, torch.int32)
        return self.len if self.prefix is None else self.prefix.total_len + self.len

    @property
    def room(self) -> int:
        """Free rows of the fullest head."""
        return int((self.capacity - self.counts).min()) if self.counts.size else 0

    # -- changes of the slots ---------------------------------------------------------------------------------------

    def append(
        self, k: Tensor, v: Tensor, pos: Tensor, first: Tensor, padding: np.ndarray, expected: int = 0
    ) -> Storage:
        """A storage with new columns first[b].. of k, v [B, Hkv, S, D], pos [B, S] after each head's slots; amortised
        O(S).

        padding    `first` on the host
        expected   slots per head, the prefix's too, that a read is going to store; a growth makes room for them
        """
        counts = self.counts + (k.shape[2] - padding)[:, None]
        if (counts <= self.capacity).all():
            return self._refilled(None, counts, k, v, pos, first)
        return self._blank(self.grown(counts, expected))._filled(self, None, counts, k, v, pos, first)

    def keep(self, index: Tensor, keep: np.ndarray, *new: Tensor) -> Storage:
        """A storage with only slots index [B, Hkv, K] of [stored | new], ascending; keep[b,h] of them, on the host.

        new   k, v [B, Hkv, S, D], pos [B, S], first [B]; none of them without new columns
        """
        wanted = keep + ROOM
        fits = self.prefix is None and (wanted <= self.capacity).all()
        if fits and self.capacity.sum() <= 2 * wanted.sum():
            return self._refilled(index, keep, *new)
        return self.gathered().moved(wanted, index, keep, *new)

    def with_room(self, expected: int = 0, room: int = ROOM) -> Storage:
        """A storage with these slots, and room for one more in every head; if it is another one, for `room` or more.
        expected: as in `append`."""
        return self if self.room else self.moved(self.grown(self.counts, expected, room))

    def tick(self) -> None:
        """Count one more slot in every head, which the next `decode` writes. A `Table` does so for many layers."""
        self.before = self.held(self.len)
        self.len, self.counts = self.len + 1, self.counts + 1

    def held(self, length: Tensor) -> Held:
        """The first length [B, Hkv] slots of each head, as an op reads or writes them."""
        return Held(self.k, self.v, self.pos, self.offset, length, self.centre, self.k_kind, self.v_kind)

    def decode(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, **options: Any) -> Any:
        """(out, lse, probs) as `_ops.decode` gives them, with the new row in the slot that was counted last."""
        return _ops.decode(q, k, v, pos, self.before, prefix=self.prefix, **options)

    def write(self, k: Tensor, v: Tensor, pos: Tensor) -> None:
        """Store rows k, v [B, Hkv, 1, D], pos [B, 1] in the slots that were counted last; not of packed numbers."""
        at = (self.offset + self.before.len).flatten()
        self.k[at], self.v[at] = k.flatten(0, 2).to(self.k.dtype), v.flatten(0, 2).to(self.v.dtype)
        self.pos[at] = pos.expand(-1, self.len.shape[1]).flatten()

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
        return rows._holding(rows.len, rows.counts) if stays else rows.moved(rows.capacity)

    def aliased(self, chosen: Tensor, at: list) -> Storage:
        """View batch rows chosen [N], the list `at` on the host, in the same buffers."""
        rows = replace(self, offset=self.offset[chosen], len=self.len[chosen], counts=self.counts[at])
        regions = tuple(self.regions[row] for row in at) if self.regions else ()
        centre = None if self.centre is None else self.centre[chosen]
        return replace(
            rows, capacity=self.capacity[at], starts=self.starts[at], regions=regions, centre=centre,
            centred=self.centred[at],
            prefix=None if self.prefix is None else self.prefix.aliased(chosen.to(self.prefix.device), at),
        )  # fmt: skip

    def moved(
        self, capacity: np.ndarray, index: Tensor | None = None, keep: np.ndarray | None = None, *new: Tensor
    ) -> Storage:
        """New buffers with room for capacity [B, Hkv] that hold keep[b,h] slots `index`, or all slots."""
        return self._blank(capacity)._filled(self, index, self.counts if keep is None else keep, *new)

    def repacked(self, kinds: kv.Kinds, centre: Tensor, known: np.ndarray) -> Storage:
        """Pack these slots anew, in other kinds, around centres as in `centred_at`."""
        into = Storage.empty(self.like[None, None].expand(*self.counts.shape, -1, -1), self.pool, kinds)
        if into.centre is not None:
            into = into.centred_at(centre, known)
        return into._blank(self.capacity)._filled(self, None, self.counts)

    def centred_at(self, centre: Tensor, known: np.ndarray) -> Storage:
        """Give batch rows that have no centre for their keys the one in centre fp32 [B, Hkv, D]. known: bool [B] on the
        host, the rows that `centre` has one for."""
        old = _ops.upload(self.centred, self.device, torch.bool)[:, None, None]
        both = torch.where(old, self.centre, centre)  # type: ignore[arg-type]  # packed keys have one
        return self._around(both, self.centred | known)

    def centred_as(self, other: Storage) -> Storage:
        """A storage with another one's centres: it may have some of rows that have no slot here."""
        if self.centre is None or other.centre is None:
            return self
        if self.on_host != other.on_host and (self.centred == other.centred).all():
            return self  # known here: no wait for the device
        return self._around(other.centre.to(self.device), other.centred)

    def _around(self, centre: Tensor | None, centred: np.ndarray) -> Storage:
        prefix = self.prefix if self.prefix is None or self.far else self.prefix._around(centre, centred)
        return replace(self, centre=centre, centred=centred, prefix=prefix)

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

    def _no_slots(self) -> Storage:
        """View none of the slots, in the same buffers."""
        none = 0 * self.counts
        return replace(self, len=0 * self.len, counts=none, capacity=none, starts=none)

    # ---------------------------------------------------------------------------------------------------------------

    def followed_by(self, other: Storage) -> Storage:
        """Append the slots of another storage; this one must have room for them."""
        after = replace(self, offset=self.offset + self.len, starts=self.starts + self.counts)
        filled = after._filled(other, None, other.counts)
        return self._holding(self.len + filled.len, self.counts + other.counts)

    def last(self, count: int) -> Storage:
        """View the last `count` slots of each head, for reading alone."""
        if self.prefix is not None and (self.counts < count).any():
            return self.gathered().last(count)
        at, counts = self.offset + self.len - count, np.full_like(self.counts, count)
        starts = self.starts + self.counts - count
        return replace(self, offset=at, len=torch.full_like(self.len, count), counts=counts, starts=starts, prefix=None)

    def with_all(self, other: Storage, expected: int = 0) -> Storage:
        """A storage with the slots of another one, which has no prefix, after these. expected: as in `append`."""
        counts = self.counts + other.counts
        into = self if (counts <= self.capacity).all() else self.moved(self.grown(counts, expected))
        return into.followed_by(other)

    def grown(self, counts: np.ndarray, expected: int = 0, room: int = ROOM) -> np.ndarray:
        """Capacity [B, Hkv] for counts and an eighth more, so that appending is O(1) on average. expected: as in
        `append`."""
        least = expected if self.prefix is None else 0
        return np.maximum(self.capacity, np.maximum(counts + np.maximum(counts // 8, room), least))

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
        if source.on_host != self.on_host:
            transfer(self, source)
            length = _ops.upload(counts, self.device, torch.int32)
            return replace(self, centred=self.centred | counts.any(1))._holding(length, counts)
        if not new:
            batch, heads = counts.shape
            none = source.like.new_empty(batch, heads, 0, source.dim)
            new = (none, none, source.pos.new_empty(batch, 0), source.pos.new_zeros(batch))
        k, v, pos, first = new
        length = _ops.upload(counts, self.device, torch.int32)
        _ops.compact(source, k, v, pos, first, index, length, self)
        return replace(self, centred=self.centred | counts.any(1))._holding(length, counts)

    def _alone(self) -> Storage:
        """Move these slots out of their pool, for a copy or a file of the storage."""
        return replace(self, pool=None).moved(self.capacity) if self.regions else self

    def _holding(self, length: Tensor, counts: np.ndarray) -> Storage:
        return replace(self, len=length, counts=counts.copy())  # layers that share a choice count apart

    # -- the stored slots -------------------------------------------------------------------------------------------

    def longest(self) -> int:
        """Slots of the fullest head."""
        return int(self.total_counts.max()) if self.counts.size else 0

    def slot_bytes(self) -> int:
        """Bytes of a slot's key and value, with their scales."""
        return sum(x.element_size() * x.shape[1] for x in (self.k, self.v))

    def live_bytes(self) -> int:
        """Bytes of the stored keys and values: `slot_bytes` * sum(len)."""
        return 0 if self.k is None else self.slot_bytes() * int(self.total_counts.sum())

    def padded_bytes(self) -> int:
        """`live_bytes` if every head were padded to the fullest."""
        return self.slot_bytes() * self.counts.size * self.longest()

    def tensors(self) -> tuple:
        """All tensors that take up memory, the prefix's too; of a pool as many rows as are lent."""
        if self.k is None:
            return ()
        prefix = () if self.prefix is None else self.prefix.tensors()
        lent = sum(region.rows for region in set(self.regions)) if self.regions else None
        centre = () if self.centre is None else (self.centre,)
        return *prefix, *(t[:lent] for t in self.buffers), self.offset, self.len, *centre

    def segments(self) -> Iterator[tuple[int, int, slice]]:
        """(b, h, slice of the flat buffers) of every head's slots, without a prefix's."""
        lens = self.counts.tolist()
        for b, row in enumerate(self.starts.tolist()):
            for h, start in enumerate(row):
                yield b, h, slice(start, start + lens[b][h])

    def places(self, b: int, h: int) -> list[tuple[Storage, slice]]:
        """Where the slots of a head lie, in order: storages, and slices of their flat buffers."""
        before = [] if self.prefix is None else self.prefix.places(b, h)
        start = int(self.starts[b, h])
        return [*before, (self, slice(start, start + int(self.counts[b, h])))]

    def positions(self) -> list[list[Tensor]]:
        """Positions of the slots by row and head: int32 copies, of a far storage in the host's memory."""
        device = self.prefix.device if self.far else self.device
        rows, heads = map(range, self.counts.shape)
        each = [[[one.pos[at].to(device) for one, at in self.places(b, h)] for h in heads] for b in rows]
        return [[torch.cat(parts) for parts in row] for row in each]

    def numbers(self, name: str, b: int, h: int, rows: slice) -> Tensor:
        """The numbers [n, D] of rows of "k" or "v" that belong to head (b, h); fp32 if they are packed."""
        centre = self.centre[b, h] if name == "k" and self.centre is not None else None
        return kv.numbers(getattr(self, name)[rows], getattr(self, f"{name}_kind"), self.dim, centre)

    def dense(self, name: str) -> Any:
        """Copy [B, Hkv, longest, D] of "k" or "v", zeros after shorter heads; None before the first tokens."""
        if self.k is None:
            return None
        whole, dense = self.gathered(), self.like.new_zeros(*self.len.shape, self.longest(), self.dim)
        for b, h, rows in whole.segments():
            dense[b, h, : rows.stop - rows.start] = whole.numbers(name, b, h, rows)
        return dense


def _laid_out(storage: Storage, capacity: np.ndarray, start: int = 0) -> Storage:
    """Heads lie one after the other, from row `start` on."""
    starts = start + (capacity.cumsum() - capacity.ravel()).reshape(capacity.shape)
    return replace(storage, capacity=capacity, starts=starts, offset=_ops.upload(starts, storage.device))
