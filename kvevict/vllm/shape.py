"""The sizes of a request's state in one layer, and where its parts lie.

A state has two planes of equal size. The first has the rows of keys and the last queries of some query heads. The
second has the rows of values, then the position of every row, the key centre of each head if keys are packed, the sum
of each slot's attention weights if the policy scores by it, and the last queries of the other heads. The number of
slots that each head kept at the last eviction lies beside the blocks, with those of all other layers (layers.py).
"""

import functools
import math
from dataclasses import dataclass

import torch

from ..policy import kv
from .options import VllmOptions


@dataclass(frozen=True)
class StateShape:
    """The sizes of a request's state in one layer of a model that computes in `dtype`, with heads of `dim` numbers."""

    kv_heads: int
    dim: int
    dtype: torch.dtype
    options: VllmOptions

    heads = property(lambda self: self.kv_heads * self.options.group)
    kinds = property(lambda self: kv.KINDS[self.options.kv])
    packs = property(lambda self: self.kinds[0] != kv.MODEL)  # keys have a centre

    @functools.cached_property
    def rows(self) -> int:
        return self.kv_heads * (self.options.slots + self.options.period)

    @functools.cached_property
    def row_bytes(self) -> tuple[int, int]:
        """The bytes of a row of keys and of a row of values."""
        key, value = (kv.row_bytes(kind, self.dim, self.dtype.itemsize) for kind in self.kinds)
        return key, value

    @functools.cached_property
    def numbers(self) -> int:
        """The bytes of the positions, key centres and attention sums, which are int32 and float32."""
        sums = self.options.sums * self.rows
        return 4 * (self.rows + self.packs * self.kv_heads * self.dim + sums)

    @functools.cached_property
    def query_bytes(self) -> int:
        """The bytes of one query head's last queries."""
        return self.options.window * self.dim * self.dtype.itemsize

    @functools.cached_property
    def near_keys(self) -> int:
        """The number of query heads whose last queries lie in the first plane, chosen so that both planes are about
        equally full."""
        key, value = self.row_bytes
        more = self.rows * (value - key) + self.numbers  # bytes of the second plane beyond those of the first
        return min(self.heads, max(0, -(-(self.heads * self.query_bytes + more) // (2 * max(self.query_bytes, 1)))))

    @functools.cached_property
    def plane_bytes(self) -> int:
        """The bytes of a plane, a multiple of both rows' bytes, so that the first row of every block has an index."""
        key, value = self.row_bytes
        near = self.near_keys
        first = self.rows * key + near * self.query_bytes
        second = self.rows * value + self.numbers + (self.heads - near) * self.query_bytes
        unit = math.lcm(key, value)
        return -(-max(first, second) // unit) * unit

    @property
    def pitch(self) -> int:
        """The number of rows from a block's first row to the next block's, if it is that of keys and of values; else
        0."""
        return self.plane_bytes // self.row_bytes[0] if self.options.alike else 0
