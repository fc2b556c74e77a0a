"""Buffers that the sequences of a server share. A budget bounds each sequence, so it borrows one region of known size
per layer; pages are not needed. Rows of one pool decode together wherever they lie, and none of them moves."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .storage import Storage


class Region:
    """Rows start .. start + rows - 1 of a pool, free again once nothing refers to this object."""

    def __init__(self, pool: Pool, start: int, rows: int) -> None:
        self.start, self.rows, self.buffers = start, rows, pool.buffers
        weakref.finalize(self, pool.returned.append, (start, rows)).atexit = False


class Pool:
    """`rows` slots of one layer: k and v [rows, D] and pos [rows], made for the first sequence."""

    def __init__(self, rows: int) -> None:
        self.rows, self.returned = rows, deque()  # of (start, rows)
        self.buffers: tuple = ()
        self.lock, self.free = threading.Lock(), [(0, rows)]  # (start, rows) in ascending order, none beside another

    def __reduce__(self) -> tuple:
        return type(None), ()  # a copy of a cache lies in buffers of its own

    def lend(self, rows: int, like: Storage) -> Region | None:
        """A region for slots as those of a `Storage`; None if the pool has no gap of that size, or other slots."""
        with self.lock:
            if not self.buffers:
                with torch.inference_mode(False):  # a cache filled in inference mode can be written to outside of it
                    self.buffers = tuple(t.new_empty(self.rows, *t.shape[1:]) for t in like.buffers)
            if any(
                a.shape[1:] != b.shape[1:] or a.dtype != b.dtype
                for a, b in zip(self.buffers, like.buffers, strict=True)
            ):
                return None
            self._merge()
            if rows == 0:
                return Region(self, 0, 0)
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
        """Join the regions that came back with the gaps beside them."""
        if not self.returned:
            return
        gaps = list(self.free)
        while self.returned:
            gaps.append(self.returned.popleft())
        self.free = []
        for start, rows in sorted(gap for gap in gaps if gap[1]):
            if self.free and sum(self.free[-1]) == start:
                self.free[-1] = self.free[-1][0], self.free[-1][1] + rows
            else:
                self.free.append((start, rows))
