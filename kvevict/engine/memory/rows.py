"""One batch made of the batch rows of several storages: `joined` in one `Storage`, or each in its own (`Apart`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .storage import OF_ROWS, Storage
from .stored import Stored


def together(parts: list) -> Any:
    """Concatenate a field [B, ..] of several storages or layers over their batch rows; None if the first is None."""
    return None if parts[0] is None else torch.cat(parts) if isinstance(parts[0], Tensor) else np.concatenate(parts)


def joined(storages: Sequence[Storage]) -> Storage:
    """Concatenate the batch rows of storages: as a view if all storages have the same buffers, otherwise in new
    buffers."""
    storages = [each.whole() if each.far else each for each in storages]
    first, prefix = storages[0], next((each.prefix for each in storages if each.prefix is not None), None)
    if prefix is not None:
        prefix = joined([each.prefix or _no_slots(prefix, len(each.counts)) for each in storages])
    fields = {name: together([getattr(each, name) for each in storages]) for name in OF_ROWS}
    rows = replace(first, **fields, regions=sum((each.regions for each in storages), ()), prefix=prefix)
    if all(each.k is first.k for each in storages):
        return rows
    into, row = rows._blank(rows.capacity), 0
    for each in storages:
        stop = row + len(each.counts)
        into.aliased([*range(row, stop)])._filled(each, None, each.counts)
        row = stop
    return into


def _no_slots(storage: Storage, rows: int) -> Storage:
    """Make `rows` batch rows that hold no slots, in the buffers of a storage."""
    first = storage.aliased([0] * rows)
    none = 0 * first.counts
    return replace(first, len=0 * first.len, counts=none, capacity=none, starts=none, prefix=None)


@dataclass
class Apart:
    """The archives of batch rows that decode together, one `Storage` per batch row, so that no slot is copied when a
    row joins or leaves the batch. Properties and methods do the same as those of `Storage`."""

    each: list[Storage]

    total_counts = property(lambda self: np.concatenate([one.total_counts for one in self.each]))
    device = property(lambda self: self.each[0].device)
    kinds = property(lambda self: self.each[0].kinds)
    on_host = property(lambda self: self.each[0].on_host)
    centre = property(lambda self: together([one.centre for one in self.each]))
    is_centred = property(lambda self: all(one.is_centred for one in self.each))

    @classmethod
    def of(cls, archives: Sequence[Storage | Apart]) -> Apart:
        """Split several archives into one archive per batch row."""
        each: list[Storage] = []
        for archive in archives:
            rows = range(len(archive.total_counts))
            each += archive.each if isinstance(archive, Apart) else [archive.forked().rows([row]) for row in rows]
        return cls(each)

    def append(
        self, k: Tensor, v: Tensor, pos: Tensor, first: Tensor, padding: np.ndarray, expected: object = 0
    ) -> Apart:
        rows = [slice(row, row + 1) for row in range(len(self.each))]
        each = zip(self.each, rows, strict=True)
        return Apart([one.append(k[row], v[row], pos[row], first[row], padding[row]) for one, row in each])

    def centred_as(self, other: Storage) -> Apart:
        return Apart([one.centred_as(row) for one, row in self._beside(other)])

    def with_all(self, other: Storage, expected: object = 0) -> Apart:
        return Apart([one.with_all(row) for one, row in self._beside(other)])

    def as_prefix(self) -> Apart:
        return self  # each row's archive is a fork, with its slots in a prefix

    def crop(self, count: int) -> Apart:
        return Apart([one.crop(count) for one in self.each])

    def rows(self, rows: list[int]) -> Storage | Apart:
        found = [self.each[row].forked() for row in rows]
        return found[0] if len(found) == 1 else Apart(found)

    def forked(self) -> Apart:
        return Apart([one.forked() for one in self.each])

    def gathered(self) -> Storage:
        return joined(self.each).gathered()

    def places(self, b: int, h: int) -> list[tuple[Stored, slice]]:
        return self.each[b].places(0, h)

    def tensors(self) -> tuple:
        return tuple(tensor for one in self.each for tensor in one.tensors())

    def _beside(self, other: Storage) -> Iterator[tuple[Storage, Storage]]:
        """Yield (archive of a batch row, view of the same batch row of `other`)."""
        return zip(self.each, (other.aliased([row]) for row in range(len(self.each))), strict=True)
