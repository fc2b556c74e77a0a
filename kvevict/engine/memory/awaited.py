"""What a layer has beside the slots of all tokens while answers attend to these (`Policy.recall_after`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...policy.seen.slots import Bounds
from .storage import Storage, together

OF_ROWS = {"q": 2, "out": 1, "lse": 2}  # fields of rows, and the dimension that counts these


@dataclass(frozen=True)
class Awaited:
    """What a layer's prompt chose, and the rows that choose in the end, of the N batch rows `at`. The number of the
    answers' tokens so far is the sequence's `since`."""

    at: list[int]  # batch rows of the cache, ascending: others have chosen
    slots: np.ndarray  # [N] number over the heads of all ranks that the prompt's rows chose
    protected: tuple[Tensor, Tensor]  # [N] first and last slots of the prompt that are always kept
    bounds: Bounds
    skip: Tensor  # int32 [N] rows before this one do not count
    q: Tensor  # [N, H, R, D] of the prompt's last rows, and of the answer's
    out: Tensor | None  # [N, R, H, D] their outputs, if those are wanted
    lse: Tensor | None  # [N, H, R] theirs over all slots up to their own; None: they see the chosen slots alone
    chosen: tuple | None = None  # the `storage` and `head_offsets` of these slots; None: the layer's own

    def with_row(self, **row: Tensor) -> Awaited:
        """With a row of the answers, of q [B, H, 1, D], out [B, 1, H, D] and lse [B, H, 1]."""
        if len(self.at) < len(row["q"]):
            row = {name: x[self.at] for name, x in row.items()}
        return self._changed(lambda x, dim, name: torch.cat([x, row[name]], dim))

    def crop(self, count: int) -> Awaited:
        """Without the last `count` rows."""
        left = slice(self.q.shape[2] - count)
        return self._changed(lambda x, dim, name: x[(slice(None),) * dim + (left,)])

    def _changed(self, change: Callable[[Tensor, int, str], Tensor], **fields: Any) -> Awaited:
        """With change(tensor, dimension of its rows, name) in place of q, out and lse, where they are."""
        for name, dim in OF_ROWS.items():
            x = getattr(self, name)
            fields[name] = None if x is None else change(x, dim, name)
        return replace(self, **fields)

    def rows(self, rows: list[int]) -> Awaited | None:
        """With these batch rows, as of `Storage.rows`. None: all of them have chosen."""
        number = {row: n for n, row in enumerate(self.at)}
        at = [place for place, row in enumerate(rows) if row in number]
        if not at:
            return None
        mine = [number[rows[place]] for place in at]
        chosen = torch.tensor(mine, device=self.q.device)
        kept = self.chosen and (self.chosen[0].rows(chosen), _rows(self.chosen[1], mine))
        own = {name: _rows(getattr(self, name), chosen) for name in ("protected", "skip", *OF_ROWS)}
        bounds = Bounds(*_rows(self.bounds, chosen))
        return replace(self, at=at, slots=self.slots[mine], bounds=bounds, chosen=kept, **own)

    def moved(self, start: int) -> Awaited:
        """With batch rows that follow `start` others."""
        return replace(self, at=[start + row for row in self.at])

    @classmethod
    def joined(cls, each: Sequence[Awaited]) -> Awaited:
        """The batch rows of several, one after the other; all of them `joins`."""
        most = max(one.q.shape[2] for one in each)
        each = [one._padded(most - one.q.shape[2]) for one in each]
        own = {name: together([getattr(one, name) for one in each]) for name in ("slots", "skip", *OF_ROWS)}
        first, last = (torch.cat(ends) for ends in zip(*(one.protected for one in each), strict=True))
        bounds = Bounds(*(together([*parts]) for parts in zip(*(one.bounds for one in each), strict=True)))
        storages, offsets = zip(*(one.chosen for one in each), strict=True)
        chosen = Storage.joined(storages), together([*offsets])
        at = [row for one in each for row in one.at]
        return cls(at=at, protected=(first, last), bounds=bounds, chosen=chosen, **own)

    def _padded(self, gap: int) -> Awaited:
        """With so many rows before the others that do not count."""
        pad = torch.nn.functional.pad
        return self._changed(lambda x, dim, _: pad(x, (0, 0) * (x.ndim - 1 - dim) + (gap, 0)), skip=self.skip + gap)

    def joins(self, other: Awaited) -> bool:
        """Whether the rows of both can be side by side."""
        mine, yours = ([one.chosen and one.chosen[1], *one.bounds, one.out] for one in (self, other))
        alike = all((x is None) == (y is None) for x, y in zip(mine, yours, strict=True))
        return alike and self.chosen is not None and other.chosen is not None

    def tensors(self) -> tuple:
        own = () if self.chosen is None else self.chosen[0].tensors()
        return *own, *self.protected, *self.bounds, self.skip, self.q, self.out, self.lse


def _rows(each: Any, chosen: Any) -> Any:
    """Batch rows of an array, of None or of several of these."""
    if isinstance(each, tuple):
        return tuple(_rows(one, chosen) for one in each)
    return None if each is None else each[chosen]
