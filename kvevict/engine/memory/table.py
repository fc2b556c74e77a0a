"""The slot counts of a cache's layers while tokens are decoded, at addresses that stay the same from token to token."""

from collections.abc import Sequence as Items
from itertools import count

import numpy as np
import torch

from .storage import Storage

_numbers = count(1)  # of every table's `number`; no two tables of this process have the same


class Counts:
    """Slot counts [layers, B, Hkv] of the layers on one device: int32 `before` and `after` the running step on the
    device, and `after` also as `host`, in the host's memory; `capacity` is the number of slots that a head can hold."""

    def __init__(self, device: torch.device, shape: tuple[int, ...]) -> None:
        with torch.inference_mode(False):  # so that a cache filled in inference mode can be decoded outside of it
            self.before, self.after = torch.zeros(2, *shape, dtype=torch.int32, device=device)
        self.host, self.capacity = np.zeros(shape, np.int64), np.zeros(shape, np.int64)

    def hold(self, at: int, storage: Storage) -> None:
        """Move the counts of a storage into row `at`, and let the storage read them there."""
        self.after[at].copy_(storage.len)
        self.host[at], self.capacity[at] = storage.counts, storage.capacity
        storage.len, storage.counts = self.after[at], self.host[at]
        storage.before = storage.held(self.before[at])


class Table:
    """Counts one more slot in every head of all layers, once for each decoded token. The table owns the counts of the
    storages that it has taken, and such a storage has the table's `number`. A storage that replaces another one (after
    a cut, in a fork or for other batch rows) has no number, so `take` must be called before the next `tick`."""

    def __init__(self) -> None:
        self.number = next(_numbers)  # another one after slots have moved, that is once `take` gets other storages
        self.groups: dict[tuple, Counts] = {}  # (device, batch size, kv heads) -> counts of the layers with these

    def holds(self, storages: Items[Storage]) -> bool:
        """Whether `tick` can be called for these storages: their counts are in this table, and every head has room."""
        full = any((counts.host >= counts.capacity).any() for counts in self.groups.values())
        return bool(self.groups) and not full and all(storage.table == self.number for storage in storages)

    def take(self, storages: Items[Storage]) -> None:
        """Move the counts of these storages into this table. Every head must have room for one more slot."""
        members: dict[tuple, list[Storage]] = {}
        for storage in storages:
            members.setdefault((storage.device, *storage.counts.shape), []).append(storage)
        before, self.groups, known = self.groups, {}, self.number
        if not all(storage.table == known for storage in storages):
            self.number = next(_numbers)
        for key, group in members.items():
            counts = before.get(key)
            is_new = counts is None or len(counts.host) != len(group)
            if counts is None or is_new:
                counts = Counts(key[0], (len(group), *key[1:]))
            for at, storage in enumerate(group):
                if is_new or storage.table != known:
                    counts.hold(at, storage)
                storage.table = self.number
            self.groups[key] = counts

    def tick(self) -> None:
        """Count one more slot in every head; the next `Storage.decode` of each layer writes it."""
        for counts in self.groups.values():
            counts.before.copy_(counts.after)
            counts.after += 1
            counts.host += 1
