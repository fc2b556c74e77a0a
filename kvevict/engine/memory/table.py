"""The slot counts of a cache's layers while tokens are decoded, in memory that stays where it is."""

import weakref
from collections.abc import Sequence as Items
from operator import is_
from typing import Any

import numpy as np
import torch

from .storage import Storage


class Counts:
    """Counts of layers on one device: int32 [layers, B, Hkv] before and after the running step, and on the host."""

    def __init__(self, device: torch.device, shape: tuple[int, ...]) -> None:
        with torch.inference_mode(False):  # counts of a cache filled in inference mode go on outside of it
            self.before, self.after = torch.zeros(2, *shape, dtype=torch.int32, device=device)
        self.host = np.zeros(shape, np.int64)
        self.storages: list[Any] = [None] * shape[0]

    def hold(self, at: int, storage: Storage) -> None:
        """The counts of a layer's storage lie here from now on."""
        if self.storages[at] is storage:
            return
        self.after[at].copy_(storage.len)
        self.host[at] = storage.counts
        storage.len, storage.counts = self.after[at], self.host[at]
        storage.before = storage.held(self.before[at])
        self.storages[at] = storage


class Table:
    """Counts one more slot in every head of all layers, once for each decoded token.

    A storage that took the place of another (a cut, a fork, other batch rows) is held from the next `take` on.
    """

    def __init__(self) -> None:
        self.storages: list[Storage] = []
        self.groups: dict[Any, Counts] = {}  # (device, batch, heads) -> counts of the layers there
        self.room = 0  # how often `tick` can go on in these storages

    def holds(self, storages: Items[Storage]) -> bool:
        """True if `tick` can go on at once."""
        return self.room > 0 and self._same(storages)

    def _same(self, storages: Items[Storage]) -> bool:
        return len(storages) == len(self.storages) and all(map(is_, storages, self.storages))

    def take(self, storages: Items[Storage]) -> None:
        """Take over these storages' counts. Each must have room."""
        groups: dict[Any, list[Storage]] = {}
        for storage in storages:
            groups.setdefault((storage.device, *storage.counts.shape), []).append(storage)
        for (device, *shape), members in groups.items():
            key = device, *shape
            if key not in self.groups or len(self.groups[key].storages) != len(members):
                self.groups[key] = Counts(device, (len(members), *shape))
            for at, storage in enumerate(members):
                self.groups[key].hold(at, storage)
                storage.table = weakref.ref(self)  # so that a dropped cache's memory is free at once
        self.groups = {key: self.groups[key] for key in groups}
        if not self._same(storages):  # another list tells that slots moved
            self.storages = list(storages)
        self.room = min((storage.room for storage in storages), default=0)

    def tick(self) -> None:
        """Count on: the next `Storage.decode` of each layer writes the slot."""
        for counts in self.groups.values():
            counts.before.copy_(counts.after)
            counts.after += 1
            counts.host += 1
        self.room -= 1
