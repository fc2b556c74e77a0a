"""The storage of a layer's slots, with the methods that change them: append, keep, fork, join. Each head has a few free
rows after its slots in the flat buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...ops import _ops
from ...ops._ops import Held
from ...policy import kv
from .host import Coming, transfer
from .mapped import Files
from .pool import SlotPool
from .stored import Stored

ROOM = 64  # free rows per head after an eviction, so that decoding appends without moving anything
ROOM_TO_REPLAY = 256  # `ROOM` while recorded decode steps are replayed: more, as they are invalid once slots move
OF_ROWS = "offset", "len", "counts", "capacity", "starts", "centre", "centred"  # fields [B, ..] of a storage
Lender = SlotPool | Files  # an object that lends buffers
Decoded = tuple[Tensor, Tensor, Tensor | None]  # (out, lse, probs) as `_ops.decode` returns them


@dataclass
class Storage(Stored):
    """The slots of a layer, with room for `capacity[b,h]` slots per head. All fields are None before the first token.
    A method that changes the slots returns the storage to use from then on; the old storage, which may have the same
    buffers, may not be used any more. Only decoding changes a storage in place: `tick` counts the new token's slot,
    then `decode` writes it. Other storages read the buffers of a fork's `prefix`, too, and no storage writes to them;
    several batch rows may share one batch row of the prefix.

    A storage is `far` if its prefix is in the host's memory and the slots after the prefix are on another device. To be
    read, all its slots are copied to that device: once inside `here`, otherwise at each use.
    """

    prefix: Storage | None = None
    capacity: np.ndarray = None  # type: ignore[assignment]  # [B, Hkv] buffer rows of each head, on the host
    pool: Lender | None = None  # lends the buffers that slots move to; None: they move to new tensors
    before: Held = field(default=None, init=False)  # type: ignore[assignment]  # the slots without the newest one
    table: int = field(default=0, init=False)  # the `number` of the `Table` that owns the counts; 0: none does
    coming: Coming[Storage] | None = field(default=None, init=False)  # a far storage's slots, copied to its device
    # (slots, prefix's slots) that `decode` reads in place of `before` and `prefix` while a step is recorded
    recorded: tuple[Held, Held | None] | None = field(default=None, init=False)

    @classmethod
    def empty(cls, keys: Tensor, pool: Lender | None = None, kinds: kv.Kinds = kv.KINDS["model"]) -> Storage:
        """Create an empty storage for slots of the shape, dtype and device of keys [B, Hkv, *, D]."""
        batch, heads, _, dim = keys.shape
        flat, none = keys.new_empty(0, dim), np.zeros((batch, heads), np.int64)
        k, v = (kv.buffer(each, flat) for each in kinds)
        centre = None if kinds[0] == kv.MODEL else keys.new_zeros(batch, heads, dim, dtype=torch.float32)
        made = cls.packed(k, v, flat.new_empty(0, dtype=torch.int32), none, flat, centre, kinds)
        return replace(made, pool=pool, centred=np.zeros(batch, bool))

    @classmethod
    def packed(
        cls, k: Tensor, v: Tensor, pos: Tensor, counts: np.ndarray, like: Tensor, centre: Tensor | None, kinds: kv.Kinds
    ) -> Storage:
        """Make a storage of flat buffers that contain counts [B, Hkv] slots, head after head without free rows."""
        centred = np.asarray(counts.any(1))
        flat = cls(k, v, pos, centre=centre, k_kind=kinds[0], v_kind=kinds[1], like=like, centred=centred)
        return _laid_out(flat, counts)._holding(_ops.upload(counts, k.device, torch.int32), counts)

    def __reduce_ex__(self, protocol: Any) -> Any:
        alone = replace(self, pool=None).moved(self.capacity) if self.regions else self  # copies have their own buffers
        return object.__reduce_ex__(alone, protocol)

    def __getstate__(self) -> dict:
        return self.__dict__ | dict(before=None, table=0, coming=None, recorded=None)

    @property
    def room(self) -> int:
        """The number of slots for which every head still has room."""
        return int((self.capacity - self.counts).min()) if self.counts.size else 0

    # -- changes of the slots ---------------------------------------------------------------------------------------

    def append(
        self, k: Tensor, v: Tensor, pos: Tensor, first: Tensor, padding: np.ndarray, expected: int | np.ndarray = 0
    ) -> Storage:
        """Append the columns from first[b] on of k, v [B, Hkv, S, D] and pos [B, S] to each head; amortised O(S) time.
        padding    `first` on the host
        expected   slots per head, the prefix's included, after the running read: one number, or [B, 1]. If the buffers
                   have to grow, they get room for this many slots
        """
        counts = self.counts + (k.shape[2] - padding)[:, None]
        if (counts <= self.capacity).all():
            return self._refilled(None, counts, k, v, pos, first)
        return self._blank(self.grown(counts, expected))._filled(self, None, counts, k, v, pos, first)

    def keep(self, index: Tensor, keep: np.ndarray, *new: Tensor, computed: bool = False) -> Storage:
        """Keep only the slots index [B, Hkv, K], ascending, of [stored | new]: keep[b,h] of them in each head.

        new        k, v [B, Hkv, S, D], pos [B, S] and first [B] of new columns, as in `append`; empty without these
        computed   store the kept slots unpacked, in the dtype in which the model computes
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
        """Make room for one more slot in every head. If slots have to move, each head gets room for `expected` slots
        or, if it has as many already, at least `room` free rows."""
        return self if self.room else self.moved(self.grown(self.counts + 1, expected, room))

    def tick(self) -> None:
        """Count one more slot in every head, which the next `decode` writes. `Table.tick` does this for many layers at
        once."""
        self.before = self.held(self.len)
        self.len, self.counts = self.len + 1, self.counts + 1

    def decode(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, **options: Any) -> Decoded:
        """Write a decoded token's row to the newest slot, which `tick` has counted, and attend to all slots."""
        held, prefix = self.recorded or (self.before, self.prefix)
        return _ops.decode(q, k, v, pos, held, prefix=prefix, **options)

    def crop(self, count: int) -> Storage:
        """Remove the last `count` slots of every head. Later tokens overwrite the removed slots, unless these are in a
        prefix."""
        if self.prefix is not None and (self.counts < np.minimum(count, self.total_counts)).any():
            return self.gathered().crop(count).as_prefix()
        return self._holding((self.len - count).clamp_min(0), np.maximum(self.counts - count, 0))

    def rows(self, rows: list[int]) -> Storage:
        """Keep the batch rows `rows`, in this order. They move to new buffers if a row occurs twice, or if fewer than
        half of the batch rows are kept and no pool or file has lent the buffers."""
        stays = len({*rows}) == len(rows) and (self.regions or 2 * len(rows) >= len(self.counts))
        chosen = self.aliased(rows)
        return chosen if stays else chosen.moved(chosen.capacity)

    def aliased(self, rows: list[int]) -> Storage:
        """Return a view of the batch rows `rows`, in the same buffers."""
        at = _ops.upload(rows, self.device)
        own = {name: getattr(self, name) for name in OF_ROWS}
        fields: Any = {name: x if x is None else x[at if isinstance(x, Tensor) else rows] for name, x in own.items()}
        regions, prefix = tuple(self.regions[row] for row in rows) if self.regions else (), self.prefix
        if prefix is not None:
            prefix = prefix.aliased(rows) if prefix.total_counts[rows].any() else None
        return replace(self, **fields, regions=regions, prefix=prefix)

    def moved(
        self, capacity: np.ndarray, index: Tensor | None = None, keep: np.ndarray | None = None, *new: Tensor
    ) -> Storage:
        """Copy slots to new buffers with room for capacity [B, Hkv] slots: all slots if `index` is None, otherwise the
        slots that the method `keep` would keep."""
        return self._blank(capacity)._filled(self, index, self.counts if keep is None else keep, *new)

    def repacked(self, kinds: kv.Kinds, centre: Tensor, known: np.ndarray) -> Storage:
        """Pack all slots anew, in the formats `kinds`. centre, known: the key centres, as in `centred_at`."""
        return self.none(kinds, centre, known)._blank(self.capacity)._filled(self, None, self.counts)

    # -- forks ------------------------------------------------------------------------------------------------------

    def forked(self) -> Storage:
        """Return a fork, which begins with these slots; they may not move from now on. The fork shares all slots, or,
        if this storage has a prefix, those of the prefix; slots after the prefix are copied."""
        twin = replace(self, pool=self._memory)  # a fork of an archive in files grows in memory
        return twin.as_prefix() if self.prefix is None else twin.moved(self.capacity)

    def as_prefix(self) -> Storage:
        """Return an empty storage with these slots as its prefix; this storage itself if it has a prefix already."""
        return self if self.prefix is not None else self.blank(self.pool, self.fixed())

    def fixed(self) -> Storage:
        """Return a view of these slots whose counts do not change when slots are appended here: `append` and a `Table`
        count in place."""
        return replace(self, pool=self._memory, len=self.len.clone(), counts=self.counts.copy())

    def blank(self, pool: Lender | None, prefix: Storage | None = None) -> Storage:
        """Create an empty storage for slots of the same shape, packing and device, after an optional prefix."""
        none = 0 * self.counts
        return replace(self, pool=pool, prefix=prefix)._blank(none)._holding(torch.zeros_like(self.len), none)

    def blank_on(
        self, device: torch.device, on_host: bool, pool: Lender | None = None, prefix: Storage | None = None
    ) -> Storage:
        """Create an empty storage as `blank` does, on another device or in the host's memory."""
        k, v, pos = (t[:0].to(device) for t in self.buffers)
        centre = None if self.centre is None else self.centre.to(device)
        length, like = torch.zeros(self.counts.shape, dtype=torch.int32, device=device), self.like.to(device)
        there = replace(self, k=k, v=v, pos=pos, like=like, centre=centre, len=length, on_host=on_host)
        return there.blank(pool, prefix)

    def none(self, kinds: kv.Kinds, centre: Tensor | None = None, known: np.ndarray | bool = False) -> Storage:
        """Create an empty storage for rows in the formats `kinds`. centre, known: key centres, as in `centred_at`."""
        made = Storage.empty(self.like[None, None].expand(*self.counts.shape, -1, -1), self.pool, kinds)
        return made if made.centre is None or centre is None else made.centred_at(centre, known)

    _memory = property(lambda self: None if isinstance(self.pool, Files) else self.pool)

    def fetch(self) -> None:
        """Begin to copy all slots of a far storage to its device; `gathered` returns the copy."""
        if self.far and self.coming is None:
            self.coming = self._copied(self.total_counts)

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """A context in which the slots of a far storage (its prefix is in the host's memory) are copied to the device
        once, instead of at each use."""
        self.fetch()
        try:
            yield
        finally:
            self.coming = None

    def gathered(self) -> Storage:
        """Return all slots in one set of buffers, for reading only; the prefix itself if it contains all slots."""
        if self.far:
            return (self.coming or self._copied(self.total_counts)).slots()
        return self.prefix.gathered() if self.prefix is not None and not self.counts.any() else self.whole()

    def whole(self) -> Storage:
        """Return all slots in one storage without a prefix; the prefix's slots are copied into its buffers."""
        if self.prefix is None:
            return self
        if self.far:
            return self._copied(self.grown(self.total_counts)).slots()
        before, total = self.prefix.whole(), self.total_counts
        owned = before is not self.prefix and (total <= before.capacity).all()  # a prefix of several parts was copied
        return (before if owned else before.moved(before.grown(total))).followed_by(self)

    def _copied(self, capacity: np.ndarray) -> Coming[Storage]:
        """Begin to copy all slots of a far storage to its device, into new buffers for capacity [B, Hkv] slots."""
        into = replace(self, pool=None, prefix=None)._blank(capacity)
        return Coming(replace(into, pool=self.pool)._holding(self.total_len, self.total_counts), self)

    def followed_by(self, other: Stored) -> Storage:
        """Append the slots of `other`, except those of its prefix. This storage must have room for them."""
        after = replace(self, offset=self.offset + self.len, starts=self.starts + self.counts)
        filled = after._filled(other, None, other.counts)
        return self._holding(self.len + filled.len, self.counts + other.counts)

    def with_all(self, other: Stored, expected: int | np.ndarray = 0) -> Storage:
        """Append the slots of `other`, which has no prefix, and move to larger buffers if they do not fit. expected: as
        in `append`."""
        counts = self.counts + other.counts
        into = self if (counts <= self.capacity).all() else self.moved(self.grown(counts, expected))
        return into.followed_by(other)

    def grown(self, counts: np.ndarray, expected: int | np.ndarray = 0, room: int = ROOM) -> np.ndarray:
        """Return the capacity [B, Hkv] that new buffers for counts [B, Hkv] slots should have: the `expected` slots, as
        in `append`, or, if counts exceed these, an eighth more than counts (at least `room` rows more), so that
        appending a slot takes amortised O(1) time."""
        own = expected if self.prefix is None else expected - self.prefix.total_counts
        return np.maximum(self.capacity, np.where(counts <= own, own, counts + np.maximum(counts // 8, room)))

    def _blank(self, capacity: np.ndarray) -> Storage:
        """Return this storage with new buffers for capacity [B, Hkv] slots, which are still to be filled."""
        rows = int(capacity.sum())
        lent = None if self.pool is None else self.pool.lend(rows, self)
        if lent is not None:
            (k, v, pos), start, regions = lent.buffers, lent.start, (lent,) * len(capacity)
        else:
            start, regions = 0, ()
            with torch.inference_mode(False):  # so that a cache filled in inference mode can be written to later
                pinned = self.on_host and torch.cuda.is_available()
                k, v, pos = (t.new_empty(rows, *t.shape[1:], pin_memory=pinned) for t in self.buffers)
        return _laid_out(replace(self, k=k, v=v, pos=pos, regions=regions), capacity, start)

    def _refilled(self, index: Tensor | None, counts: np.ndarray, *new: Tensor) -> Storage:
        """Fill these buffers from this storage itself, as `_filled` does, and update the counts in place, since a
        `Table` may hold them."""
        filled = self._filled(self, index, counts, *new)
        with torch.inference_mode(self.len.is_inference()):
            self.len.copy_(filled.len)
        self.counts[...], self.centred, self.coming = counts, filled.centred, None
        return self

    def _filled(self, source: Stored, index: Tensor | None, counts: np.ndarray, *new: Tensor) -> Storage:
        """Fill these buffers with counts [B, Hkv] slots of [source | new]: the slots `index`, or, if it is None, the
        first ones. If `source` is in another memory (host or device), all its slots are copied."""
        length = _ops.upload(counts, self.device, torch.int32)
        if source.on_host != self.on_host:
            transfer(self, source)
        else:
            if not new:
                none, pos = source.like.new_empty(*counts.shape, 0, source.dim), source.pos.new_empty(len(counts), 0)
                new = (none, none, pos, source.pos.new_zeros(len(counts)))
            k, v, pos, first = new
            _ops.compact(source, k, v, pos, first, index, length, self)
        return replace(self, centred=self.centred | counts.any(1))._holding(length, counts)

    def _holding(self, length: Tensor, counts: np.ndarray) -> Storage:
        return replace(self, len=length, counts=counts.copy())  # a copy, since layers may share one choice's array


def _laid_out(storage: Storage, capacity: np.ndarray, start: int = 0) -> Storage:
    """Give each head capacity[b,h] buffer rows, one head after the other from row `start` on."""
    starts = start + (capacity.cumsum() - capacity.ravel()).reshape(capacity.shape)
    return replace(storage, capacity=capacity, starts=starts, offset=_ops.upload(starts, storage.device))
