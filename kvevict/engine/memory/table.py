"""The slot counts of a cache's layers while tokens are decoded, at addresses that stay the same from token to token."""

import weakref
from collections.abc import Sequence as Items
from operator import is_

import numpy as np
import torch

from .storage import Storage


class Counts:
    """Slot counts [layers, B, Hkv] of the layers on one device: int32 `before` and `after` the running step on the
    device, and `after` also as `host`, in the host's memory."""

    def __init__(self, device: torch.device, shape: tuple[int, ...]) -> None:
        with torch.inference_mode(False):  # so that a cache filled in inference mode can be decoded outside of it
            self.before, self.after = torch.zeros(2, *shape, dtype=torch.int32, device=device)
        self.host = np.zeros(shape, np.int64)
        self.storages: list[Storage | None] = [None] * shape[0]

    def hold(self, at: int, storage: Storage) -> None:
        """Move the counts of a storage into row `at` of `after` and of `host`, and let the storage refer to them."""
        if self.storages[at] is storage:
            return
        self.after[at].copy_(storage.len)
        self.host[at] = storage.counts
        storage.len, storage.counts = self.after[at], self.host[at]
        storage.before = storage.held(self.before[at])
        self.storages[at] = storage


class Table:
    """Counts one more slot in every head of all layers, once for each decoded token.

    When a layer gets another storage (by a cut, a fork or a selection of batch rows), `take` must be called before the
    next `tick`.
    """

    def __init__(self) -> None:
        self.storages: list[Storage] = []  # the layers' storages; another list object after slots have moved
        self.groups: dict[tuple, Counts] = {}  # (device, batch size, kv heads) -> counts of the layers with these
        self.room = 0  # number of further calls of `tick` until some head is full

    def holds(self, storages: Items[Storage]) -> bool:
        """Whether `tick` can be called for these storages: their counts are in this table, and every head has room."""
        return self.room > 0 and self._same(storages)

    def _same(self, storages: Items[Storage]) -> bool:
        return len(storages) == len(self.storages) and all(map(is_, storages, self.storages))

    def take(self, storages: Items[Storage]) -> None:
        """Move the counts of these storages into this table. Every head must have room for one more slot."""
        members: dict[tuple, list[Storage]] = {}
        for storage in storages:
            members.setdefault((storage.device, *storage.counts.shape), []).append(storage)
            storage.table = weakref.ref(self)  # weak, so that the memory of a dropped cache is free at once
        before, self.groups = self.groups, {}
        for key, group in members.items():
            counts = before.get(key)
            if counts is None or len(counts.storages) != len(group):
                counts = Counts(key[0], (len(group), *key[1:]))
            for at, storage in enumerate(group):
                counts.hold(at, storage)
            self.groups[key] = counts
        if not self._same(storages):
            self.storages = list(storages)
        self.room = min((storage.room for storage in storages), default=0)

    def tick(self) -> None:
        """Count one more slot in every head; the next `Storage.decode` of each layer writes it."""
        for counts in self.groups.values():
            counts.before.copy_(counts.after)
            counts.after += 1
            counts.host += 1
        self.room -= 1
