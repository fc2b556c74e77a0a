"""Archives of batch rows that decode together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .storage import Storage


@dataclass
class Apart:
    """The archives of batch rows that decode together, one for each: rows join and leave without a copy of them."""

    each: list[Storage]

    total_counts = property(lambda self: np.concatenate([one.total_counts for one in self.each]))
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

    def as_prefix(self) -> Apart:
        """As `Storage.as_prefix`: each row's archive has one."""
        return self

    def crop(self, count: int) -> Apart:
        """As `Storage.crop`."""
        return Apart([one.crop(count) for one in self.each])

    def rows(self, chosen: Tensor) -> Storage | Apart:
        """As `Storage.rows`."""
        found = [self.each[row].forked() for row in chosen.tolist()]
        return found[0] if len(found) == 1 else Apart(found)

    def forked(self) -> Apart:
        """As `Storage.forked`."""
        return Apart([one.forked() for one in self.each])

    def gathered(self) -> Storage:
        """All slots in one place, for reading."""
        return Storage.joined(self.each).gathered()

    def tensors(self) -> tuple:
        return tuple(tensor for one in self.each for tensor in one.tensors())

    def _beside(self, other: Storage) -> Any:
        """Each row's archive, and its row of another storage."""
        rows = torch.arange(len(self.each), device=other.device)
        return zip(self.each, (other.aliased(at[None], [row]) for row, at in enumerate(rows)), strict=True)


def apart(archives: Sequence[Storage | Apart]) -> Apart:
    """The archives of several caches, row by row."""
    each: list = []
    for archive in archives:
        rows = torch.arange(len(archive.total_counts), device=archive.device)
        each += archive.each if isinstance(archive, Apart) else [archive.forked().rows(row[None]) for row in rows]
    return Apart(each)
