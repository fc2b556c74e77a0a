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

OF_ROWS = {"q": 2, "out": 1, "lse": 2}  # field of `Awaited` -> its dimension over query rows


@dataclass(frozen=True)
class Awaited:
    """The slots that a layer kept at the prompt's end, and the query rows by which the layer chooses again after an
    answer's first tokens (`Sequence.since` counts them). N batch rows of the cache have an answer still to choose."""

    at: list[int]  # numbers of the N batch rows, ascending
    slots: np.ndarray  # [N] number of slots kept at the prompt's end, summed over the kv heads of all ranks
    protected: tuple[Tensor, Tensor]  # int32 [N] each: number of the prompt's first and of its last slots that stay
    bounds: Bounds
    skip: Tensor  # int32 [N] number of first query rows that are padding
    q: Tensor  # [N, H, R, D] R query rows: of the prompt's last tokens, then of the answer's tokens
    out: Tensor | None  # [N, R, H, D] attention outputs of the R query rows; None: no quantity needs them
    lse: Tensor | None  # [N, H, R] log-sum-exp of the rows' logits over all slots; None: rows attend to kept slots only
    # (the kept slots, their layer's `head_offsets`); None: the kept slots are still in the layer
    chosen: tuple[Storage, np.ndarray | None] | None = None

    def with_row(self, **row: Tensor) -> Awaited:
        """Append the query row of the answers' newest token: q [B, H, 1, D], out [B, 1, H, D], lse [B, H, 1]."""
        if len(self.at) < len(row["q"]):
            row = {name: x[self.at] for name, x in row.items()}
        return self._changed(lambda x, dim, name: torch.cat([x, row[name]], dim))

    def crop(self, count: int) -> Awaited:
        """Remove the last `count` query rows."""
        left = slice(self.q.shape[2] - count)
        return self._changed(lambda x, dim, name: x[(slice(None),) * dim + (left,)])

    def _changed(self, change: Callable[[Tensor, int, str], Tensor], **fields: Any) -> Awaited:
        """Return a copy in which each of q, out and lse, unless None, is change(tensor, its dimension over query rows,
        its name), and the other fields given replace the old ones."""
        for name, dim in OF_ROWS.items():
            x = getattr(self, name)
            fields[name] = None if x is None else change(x, dim, name)
        return replace(self, **fields)

    def rows(self, rows: list[int]) -> Awaited | None:
        """Keep the batch rows `rows` of the cache, in this order; None if no row of them has an answer that is still to
        choose."""
        at = [place for place, row in enumerate(rows) if row in self.at]
        if not at:
            return None
        mine = [self.at.index(rows[place]) for place in at]
        kept = self.chosen and (self.chosen[0].rows(mine), _rows(self.chosen[1], mine))
        own = {name: _rows(getattr(self, name), mine) for name in ("slots", "protected", "skip", *OF_ROWS)}
        return replace(self, at=at, bounds=Bounds(*_rows(self.bounds, mine)), chosen=kept, **own)

    def moved(self, start: int) -> Awaited:
        """Renumber the batch rows, which come after `start` batch rows of other caches from now on."""
        return replace(self, at=[start + row for row in self.at])

    @classmethod
    def joined(cls, each: Sequence[Awaited]) -> Awaited:
        """Concatenate the batch rows of several `Awaited`, any two of which `joins` allows to join."""
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
        """Add `gap` query rows of padding, which `skip` excludes, before the present query rows."""
        pad = torch.nn.functional.pad
        return self._changed(lambda x, dim, _: pad(x, (0, 0) * (x.ndim - 1 - dim) + (gap, 0)), skip=self.skip + gap)

    def joins(self, other: Awaited) -> bool:
        """Whether the batch rows of this object and of `other` can be concatenated."""
        mine, yours = ([one.chosen and one.chosen[1], *one.bounds, one.out] for one in (self, other))
        alike = all((x is None) == (y is None) for x, y in zip(mine, yours, strict=True))
        return alike and self.chosen is not None and other.chosen is not None

    def tensors(self) -> tuple:
        own = () if self.chosen is None else self.chosen[0].tensors()
        return *own, *self.protected, *self.bounds, self.skip, self.q, self.out, self.lse


def _rows(each: Any, rows: list[int]) -> Any:
    """Select batch rows of a tensor or array, or of each item of a tuple; None stays None."""
    if isinstance(each, tuple):
        return tuple(_rows(one, rows) for one in each)
    return None if each is None else each[rows]
