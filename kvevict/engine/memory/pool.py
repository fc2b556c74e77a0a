"""Slot buffers that the sequences of a server share. A budget bounds each sequence, so a sequence needs one region of
known size per layer, and no pages. Sequences in one pool can decode together without being moved."""

from __future__ import annotations

import threading
import weakref
from collections import deque

import torch
from torch import Tensor

from .stored import Stored


class Region:
    """Buffer rows start .. start + rows - 1 of a pool, which are free again once nothing refers to this object."""

    def __init__(self, pool: SlotPool, start: int, rows: int) -> None:
        self.start, self.rows, self.buffers = start, rows, pool.buffers
        weakref.finalize(self, pool.returned.append, (start, rows)).atexit = False


class SlotPool:
    """Buffers for `rows` slots of one layer: k and v [rows, D], and pos [rows]. The buffers are allocated when the
    first region is lent."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.buffers: tuple[Tensor, ...] = ()
        self.lock, self.free = threading.Lock(), [(0, rows)]  # `free`: (start, rows) of each gap, ascending
        self.returned: deque[tuple[int, int]] = deque()  # (start, rows) of free regions that are not in `free` yet

    @property
    def keys(self) -> Tensor | None:
        """The buffer of keys; None before a region is lent."""
        return self.buffers[0] if self.buffers else None

    def __reduce__(self) -> tuple:
        return type(None), ()  # a copied or pickled cache has buffers of its own, and no pool

    def lend(self, rows: int, like: Stored) -> Region | None:
        """Lend a region of `rows` rows for slots like those of `like`. Returns None if no gap is large enough, or if
        the pool's buffers are for rows of another width or dtype."""
        with self.lock:
            if not self.buffers:
                with torch.inference_mode(False):  # so that a cache filled in inference mode can be written to later
                    self.buffers = tuple(t.new_empty(self.rows, *t.shape[1:]) for t in like.buffers)
            pairs = zip(self.buffers, like.buffers, strict=True)
            if any(a.shape[1:] != b.shape[1:] or a.dtype != b.dtype for a, b in pairs):
                return None
            if rows == 0:
                return Region(self, 0, 0)
            self._merge()
            for at, (start, gap) in enumerate(self.free):
                if gap >= rows:
                    self.free[at : at + 1] = [(start + rows, gap - rows)] if gap > rows else []
                    return Region(self, start, rows)
        return None

    def left(self) -> int:
        """Count the free rows, over gaps of any size."""
        with self.lock:
            self._merge()
            return sum(rows for _, rows in self.free)

    def _merge(self) -> None:
        """Move the returned regions to the list of gaps, and merge neighbouring gaps."""
        gaps, self.free = self.free, []
        while self.returned:
            gaps.append(self.returned.popleft())
        for start, rows in sorted(gaps):
            if self.free and sum(self.free[-1]) == start:
                self.free[-1] = self.free[-1][0], self.free[-1][1] + rows
            elif rows:
                self.free.append((start, rows))
