"""What a layer holds while an answer's first tokens attend to the slots of all tokens (`Policy.recall_after`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...policy.seen.slots import Bounds
from .rows import joined, together
from .storage import Storage

OF_ROWS = {"q": 2, "out": 1, "lse": 2}  # fields of query rows -> the dimension that counts these


@dataclass(frozen=True)
class Awaited:
    """The slots that a layer's prompt chose, and the query rows by which the layer chooses again after the answers'
    first tokens. The sequence's `since` counts these tokens. N batch rows of the cache have such an answer."""

    at: list[int]  # the N batch rows, ascending
    slots: np.ndarray  # [N] slots over the heads of all ranks that the prompt's rows chose
    protected: tuple[Tensor, Tensor]  # [N] first and last slots of the prompt that are always kept
    bounds: Bounds
    skip: Tensor  # int32 [N] query rows before this one do not count
    q: Tensor  # [N, H, R, D] queries: the prompt's last, then the answer's
    out: Tensor | None  # [N, R, H, D] outputs of these queries; None: no quantity needs them
    lse: Tensor | None  # [N, H, R] the queries' log-sum-exp over all slots; None: they attend to the chosen slots alone
    chosen: tuple[Storage, np.ndarray | None] | None = None  # chosen slots, `head_offsets`; None: they are in the layer

    def with_row(self, **row: Tensor) -> Awaited:
        """Append a query row of the answers: q [B, H, 1, D], out [B, 1, H, D], lse [B, H, 1]."""
        if len(self.at) < len(row["q"]):
            row = {name: x[self.at] for name, x in row.items()}
        return self._changed(lambda x, dim, name: torch.cat([x, row[name]], dim))

    def crop(self, count: int) -> Awaited:
        """Remove the last `count` query rows."""
        left = slice(self.q.shape[2] - count)
        return self._changed(lambda x, dim, name: x[(slice(None),) * dim + (left,)])

    def _changed(self, change: Callable[[Tensor, int, str], Tensor], **fields: Any) -> Awaited:
        """Replace q, out and lse, unless None, by change(tensor, dimension of its query rows, name)."""
        for name, dim in OF_ROWS.items():
            x = getattr(self, name)
            fields[name] = None if x is None else change(x, dim, name)
        return replace(self, **fields)

    def rows(self, rows: list[int]) -> Awaited | None:
        """Keep these batch rows of the cache, as `Storage.rows`. None: none of them has such an answer."""
        at = [place for place, row in enumerate(rows) if row in self.at]
        if not at:
            return None
        mine = [self.at.index(rows[place]) for place in at]
        kept = self.chosen and (self.chosen[0].rows(mine), _rows(self.chosen[1], mine))
        own = {name: _rows(getattr(self, name), mine) for name in ("slots", "protected", "skip", *OF_ROWS)}
        return replace(self, at=at, bounds=Bounds(*_rows(self.bounds, mine)), chosen=kept, **own)

    def moved(self, start: int) -> Awaited:
        """The same batch rows after `start` others."""
        return replace(self, at=[start + row for row in self.at])

    @classmethod
    def joined(cls, each: Sequence[Awaited]) -> Awaited:
        """Concatenate the batch rows of several, all of which `joins`."""
        most = max(one.q.shape[2] for one in each)
        each = [one._padded(most - one.q.shape[2]) for one in each]
        own = {name: together([getattr(one, name) for one in each]) for name in ("slots", "skip", *OF_ROWS)}
        first, last = (torch.cat(ends) for ends in zip(*(one.protected for one in each), strict=True))
        bounds = Bounds(*(together([*parts]) for parts in zip(*(one.bounds for one in each), strict=True)))
        storages, offsets = zip(*(one.chosen for one in each if one.chosen), strict=True)
        chosen = joined(storages), together([*offsets])
        at = [row for one in each for row in one.at]
        return cls(at=at, protected=(first, last), bounds=bounds, chosen=chosen, **own)

    def _padded(self, gap: int) -> Awaited:
        """Put `gap` query rows that do not count before the others."""
        pad = torch.nn.functional.pad
        return self._changed(lambda x, dim, _: pad(x, (0, 0) * (x.ndim - 1 - dim) + (gap, 0)), skip=self.skip + gap)

    def joins(self, other: Awaited) -> bool:
        """Whether the batch rows of both can be concatenated."""
        mine, yours = ([one.chosen and one.chosen[1], *one.bounds, one.out] for one in (self, other))
        alike = all((x is None) == (y is None) for x, y in zip(mine, yours, strict=True))
        return alike and self.chosen is not None and other.chosen is not None

    def tensors(self) -> tuple:
        own = () if self.chosen is None else self.chosen[0].tensors()
        return *own, *self.protected, *self.bounds, self.skip, self.q, self.out, self.lse


def _rows(each: Any, rows: list[int]) -> Any:
    """Batch rows of a tensor or array; of each item of a tuple; None of None."""
    if isinstance(each, tuple):
        return tuple(_rows(one, rows) for one in each)
    return None if each is None else each[rows]
