"""Buffers that the sequences of a server share. A budget bounds each sequence, so it needs one region of known size per
layer, and no pages. Rows of one pool decode together wherever they are; none is moved."""

from __future__ import annotations

import threading
import weakref
from collections import deque

import torch
from torch import Tensor

from .stored import Stored


class Region:
    """Rows start .. start + rows - 1 of a pool; free again once nothing refers to this object."""

    def __init__(self, pool: SlotPool, start: int, rows: int) -> None:
        self.start, self.rows, self.buffers = start, rows, pool.buffers
        weakref.finalize(self, pool.returned.append, (start, rows)).atexit = False


class SlotPool:
    """`rows` slots of one layer: k and v [rows, D] and pos [rows], allocated for the first sequence."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.buffers: tuple[Tensor, ...] = ()
        self.lock, self.free = threading.Lock(), [(0, rows)]  # (start, rows) of the gaps, ascending
        self.returned: deque[tuple[int, int]] = deque()  # (start, rows) of regions that are free again

    def __reduce__(self) -> tuple:
        return type(None), ()  # the copy of a cache has buffers of its own

    def lend(self, rows: int, like: Stored) -> Region | None:
        """A region for slots as those of `like`. None: no gap is large enough, or the pool has other slots."""
        with self.lock:
            if not self.buffers:
                with torch.inference_mode(False):  # a cache filled in inference mode can be written to outside of it
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
        """Free rows, in gaps of any size."""
        with self.lock:
            self._merge()
            return sum(rows for _, rows in self.free)

    def _merge(self) -> None:
        """Add the returned regions to the gaps, and join neighbours."""
        gaps, self.free = self.free, []
        while self.returned:
            gaps.append(self.returned.popleft())
        for start, rows in sorted(gaps):
            if self.free and sum(self.free[-1]) == start:
                self.free[-1] = self.free[-1][0], self.free[-1][1] + rows
            elif rows:
                self.free.append((start, rows))
