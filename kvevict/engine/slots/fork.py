"""Copy-on-write forks: one cache, many continuations that share its slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .mapped import Files
from .storage import ROOM, Storage


@dataclass
class Fork:
    """A storage of two parts: a prefix, shared with other readers and never written to, and a private part with the
    tokens that came since. Several batch rows may share one row of the prefix.

    Callers that need all slots in one place (eviction, saving) get a plain `Storage`.
    """

    prefix: Storage
    own: Storage
    shared = True
    is_centred = True  # a batch row that has no token yet keeps the centre 0

    k = property(attrgetter("prefix.k"))
    v = property(attrgetter("prefix.v"))
    pos = property(attrgetter("prefix.pos"))
    offset = property(attrgetter("prefix.offset"))
    centre = property(attrgetter("prefix.centre"))
    like, kinds = property(attrgetter("prefix.like")), property(attrgetter("prefix.kinds"))
    len = property(lambda self: self.prefix.len + self.own.len)  # [B, Hkv] int32, slots of both parts
    counts = property(lambda self: self.prefix.counts + self.own.counts)  # the same on the host
    device = property(attrgetter("prefix.device"))
    growing = property(attrgetter("own"))
    longest, slot_bytes = Storage.longest, Storage.slot_bytes
    live_bytes, padded_bytes = Storage.live_bytes, Storage.padded_bytes

    def append(self, k: Tensor, v: Tensor, pos: Tensor, first: Tensor, padding: np.ndarray, expected: int = 0) -> Fork:
        """As `Storage.append`; `expected` counts the prefix's slots, too."""
        return replace(self, own=self.own.append(k, v, pos, first, padding))

    def keep(self, *what: Any) -> Storage:
        """As `Storage.keep`; never in place, as the prefix is shared."""
        return self.gathered().keep(*what)

    def with_room(self, expected: int = 0, room: int = ROOM) -> Fork:
        """As `Storage.with_room`; the prefix does not grow."""
        return self if self.own.room else replace(self, own=self.own.with_room(0, room))

    def decode(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, columns: int = 0, **options: Any) -> Any:
        """As `Storage.decode`, with the prefix as the first segment of the same kernel. No probabilities: callers that
        want them have a chooser."""
        return self.own.decode(q, k, v, pos, prefix=self.prefix, **options)

    def centred_as(self, other: Storage) -> Fork:
        """As `Storage.centred_as`."""
        return self if self.centre is None else Fork(self.prefix.centred_as(other), self.own.centred_as(other))

    def with_all(self, other: Storage) -> Fork:
        """As `Storage.with_all`."""
        return replace(self, own=self.own.with_all(other))

    def crop(self, count: int) -> Storage | Fork:
        """As `Storage.crop`. The prefix is copied only where it loses slots."""
        if (self.own.counts < np.minimum(count, self.counts)).any():
            return self.copy_on_write().crop(count)
        return replace(self, own=self.own.crop(count))

    def rows(self, chosen: Tensor) -> Fork:
        """As `Storage.rows`; the prefix is shared."""
        return Fork(self.prefix.aliased(chosen), self.own.rows(chosen))

    @classmethod
    def joined(cls, storages: Sequence[Storage | Fork]) -> Fork:
        """Concatenate batch rows, as `Storage.joined`."""
        forks = [each if isinstance(each, Fork) else _without_prefix(each) for each in storages]
        return cls(*(Storage.joined([getattr(each, part) for each in forks]) for part in ("prefix", "own")))

    def copy_on_write(self) -> Storage:
        """A private plain storage with all slots."""
        return self.prefix.moved(self.prefix.grown(self.counts)).followed_by(self.own)

    def gathered(self) -> Storage:
        """All slots in one place, for reading: the prefix itself while there are no others."""
        return self.copy_on_write() if self.own.counts.any() else self.prefix

    def tensors(self) -> tuple:
        """All tensors, the shared ones too."""
        return *self.prefix.tensors(), *self.own.tensors()

    def positions(self) -> list[list[Tensor]]:
        return self.gathered().positions()

    def dense(self, name: str) -> Tensor | None:
        return self.gathered().dense(name)


def _without_prefix(storage: Storage) -> Fork:
    none = 0 * storage.counts
    prefix = replace(storage, len=0 * storage.len, counts=none, capacity=none, starts=none, shared=True)
    return Fork(prefix, storage)


def joined(storages: Sequence[Any]) -> Storage | Fork:
    """Concatenate the batch rows of storages and forks."""
    return (Fork if any(isinstance(each, Fork) for each in storages) else Storage).joined(storages)


@dataclass
class Apart:
    """The archives of batch rows that decode together, one for each: rows join and leave without a copy of them."""

    each: list[Storage | Fork]

    counts = property(lambda self: np.concatenate([one.counts for one in self.each]))
    device = property(lambda self: self.each[0].device)

    def append(self, k: Tensor, v: Tensor, pos: Tensor, first: Tensor, padding: np.ndarray, expected: int = 0) -> Apart:
        """As `Storage.append`; nothing is expected of a row alone."""
        rows = [slice(row, row + 1) for row in range(len(self.each))]
        return Apart(
            [one.append(k[r], v[r], pos[r], first[r], padding[r]) for one, r in zip(self.each, rows, strict=True)]
        )

    def centred_as(self, other: Storage) -> Apart:
        """As `Storage.centred_as`."""
        return Apart([one.centred_as(row) for one, row in self._beside(other)])

    def with_all(self, other: Storage) -> Apart:
        """As `Storage.with_all`."""
        return Apart([one.with_all(row) for one, row in self._beside(other)])

    def crop(self, count: int) -> Apart:
        """As `Storage.crop`."""
        return Apart([one.crop(count) for one in self.each])

    def rows(self, chosen: Tensor) -> Storage | Fork | Apart:
        """As `Storage.rows`."""
        found: list = [fork(self.each[row]) for row in chosen.tolist()]
        return found[0] if len(found) == 1 else Apart(found)

    def gathered(self) -> Storage:
        """All slots in one place, for reading."""
        return joined(self.each).gathered()

    def tensors(self) -> tuple:
        return tuple(tensor for one in self.each for tensor in one.tensors())

    def _beside(self, other: Storage) -> Any:
        """Each row's archive, and its row of another storage."""
        rows = torch.arange(len(self.each), device=other.device)
        return zip(self.each, (other.aliased(row[None]) for row in rows), strict=True)


def apart(archives: Sequence[Storage | Fork | Apart]) -> Apart:
    """The archives of several caches, row by row."""
    each: list = []
    for archive in archives:
        rows = torch.arange(len(archive.counts), device=None if isinstance(archive, Apart) else archive.device)
        each += archive.each if isinstance(archive, Apart) else [fork(archive).rows(row[None]) for row in rows]
    return Apart(each)


def fork(storage: Any) -> Any:
    """A fork of a non-empty storage. A fork's fork shares the prefix and copies the private part."""
    if isinstance(storage, Apart):
        return Apart([fork(each) for each in storage.each])
    if isinstance(storage, Fork):
        return replace(storage, own=storage.own.moved(storage.own.capacity))
    storage.shared = True
    if isinstance(storage.pool, Files):  # what is read and written from here on is not the archive's
        storage = replace(storage, pool=None)
    prefix = replace(storage, len=storage.len.clone(), counts=storage.counts.copy())  # the storage goes on
    return Fork(prefix, storage.moved(0 * storage.capacity, None, 0 * storage.counts))
