"""Where the slots lie that a recorded step reads and writes: in tensors at fixed addresses. Before a replay the places
of a cache are copied into them, so that all caches whose slots lie in the same buffers share a recording."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from ...ops._ops import Held
from ..memory.pool import Region, SlotPool
from ..memory.storage import Storage
from ..memory.table import Table


def pool_of(storages: Items[Storage]) -> SlotPool | None:
    """Return the first layer's pool if all slots of every layer lie in its pool; None otherwise."""
    for storage in storages:
        parts = [storage] if storage.prefix is None else [storage, storage.prefix]
        if not isinstance(storage.pool, SlotPool) or any(part.k is not storage.pool.keys for part in parts):
            return None
    return storages[0].pool  # type: ignore[return-value]  # the loop has checked its type


class Places:
    """The first row and the number of slots of each head in every layer, for `size` batch rows. Batch rows that a cache
    lacks are padding: their heads have no slots, and room for one."""

    def __init__(self, storages: Items[Storage], size: int, spare: Items[Region] = ()) -> None:
        """Make tensors for slots in the buffers of `storages`. spare: of each layer's pool `size` rows for each head,
        the padding's; (): a cache has exactly `size` batch rows."""
        self.size, self.spare, self.pads = size, spare, bool(spare)
        layers: dict[tuple, list[Storage]] = {}
        for storage in storages:
            layers.setdefault((storage.device, storage.counts.shape[1]), []).append(storage)
        with torch.inference_mode(False):  # so that a cache filled in inference mode is decoded outside of it, too
            # (device, Hkv) -> int32 [layers, size, Hkv] number of slots, without the newest one
            self.before = {
                key: torch.zeros(len(each), size, key[1], dtype=torch.int32, device=key[0])
                for key, each in layers.items()
            }
            lengths = {key: iter(each) for key, each in self.before.items()}
            # For each layer: its own slots, and those of its prefix, or None
            self.held = [self._held(x, next(lengths[x.device, x.counts.shape[1]])) for x in storages]

    @classmethod
    def of(cls, storages: Items[Storage], size: int | None) -> Places:
        """Make tensors for `size` batch rows, of which a cache may lack some; for exactly as many as these storages
        have if size is None, or if a pool has no room for padding."""
        spare = [] if size is None else [_spare(storage, size) for storage in storages]
        known = [region for region in spare if region is not None]
        if size is None or len(known) < len(spare):
            return cls(storages, len(storages[0].counts))
        return cls(storages, size, known)

    @staticmethod
    def _held(storage: Storage, length: Tensor) -> tuple[Held, Held | None]:
        def empty(part: Storage, length: Tensor) -> Held:
            centre = None if part.centre is None else part.centre.new_zeros(*length.shape, part.centre.shape[2])
            offset = torch.zeros_like(length, dtype=part.offset.dtype)
            return replace(part.held(length), offset=offset, centre=centre)

        prefix = storage.prefix
        return empty(storage, length), None if prefix is None else empty(prefix, torch.zeros_like(length))

    def fits(self, storages: Items[Storage]) -> bool:
        """Whether these slots lie in the same buffers, in the same formats."""

        def alike(held: Held | None, part: Storage | None) -> bool:
            if held is None or part is None:
                return held is part
            return held.k is part.k and (held.k_kind, held.v_kind) == part.kinds

        return all(
            alike(own, storage) and alike(prefix, storage.prefix)
            for (own, prefix), storage in zip(self.held, storages, strict=True)
        )

    def take(self, storages: Items[Storage]) -> None:
        """Copy the places of a cache's slots."""
        for index, ((own, prefix), storage) in enumerate(zip(self.held, storages, strict=True)):
            rows = len(storage.counts)
            for held, part in ((own, storage), (prefix, storage.prefix)):
                if held is None or part is None:
                    continue
                held.offset[:rows].copy_(part.offset)
                if held.centre is not None and part.centre is not None:
                    held.centre[:rows].copy_(part.centre)
            if prefix is not None:
                prefix.len[:rows].copy_(storage.prefix.len)
            if rows < self.size:
                own.len[rows:] = 0
                of_padding, first = own.offset[rows:], self.spare[index].start
                numbers = torch.arange(first, first + of_padding.numel(), device=of_padding.device)
                of_padding.copy_(numbers.view_as(of_padding))
                if prefix is not None:
                    prefix.len[rows:] = 0

    def tick(self, table: Table) -> None:
        """Copy the numbers of slots before the running step."""
        for (device, rows, heads), counts in table.groups.items():
            self.before[device, heads][:, :rows].copy_(counts.before)

    @contextmanager
    def read_by(self, storages: Items[Storage]) -> Iterator[None]:
        """A context in which these storages decode by the tensors here."""
        for storage, held in zip(storages, self.held, strict=True):
            storage.recorded = held
        try:
            yield
        finally:
            for storage in storages:
                storage.recorded = None


def _spare(storage: Storage, size: int) -> Region | None:
    """Borrow a row for each head of `size` batch rows from the pool of a storage; None if the pool is full."""
    heads, pool = storage.counts.shape[1], storage.pool
    return pool.lend(size * heads, storage) if isinstance(pool, SlotPool) else None
