"""What a layer has beside the slots of all tokens while an answer attends to these (`Policy.recall_after`)."""

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
    """What a layer's prompt chose, and the rows that choose in the end. The tokens of the answer so far are the
    sequence's `since`."""

    slots: np.ndarray  # [B] number over the heads of all ranks that the prompt's rows chose
    protected: tuple[Tensor, Tensor]  # [B] first and last slots of the prompt that are always kept
    bounds: Bounds
    skip: Tensor  # int32 [B] rows before this one do not count
    q: Tensor  # [B, H, R, D] of the prompt's last rows, and of the answer's
    out: Tensor | None  # [B, R, H, D] their outputs, if those are wanted
    lse: Tensor | None  # [B, H, R] theirs over all slots up to their own; None: they see the chosen slots alone
    chosen: tuple | None = None  # the `storage` and `head_offsets` of these slots; None: the layer's own

    def with_row(self, **row: Tensor) -> Awaited:
        """With a row of the answer, q [B, H, 1, D], out [B, 1, H, D] and lse [B, H, 1]."""
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

    def rows(self, chosen: Tensor) -> Awaited:
        """With batch rows chosen [N], as of `Storage.rows`."""
        at = chosen.tolist()
        kept = self.chosen and (self.chosen[0].rows(chosen), _rows(self.chosen[1], at))
        own = {name: _rows(getattr(self, name), chosen) for name in ("protected", "skip", *OF_ROWS)}
        return replace(self, slots=self.slots[at], bounds=Bounds(*_rows(self.bounds, chosen)), chosen=kept, **own)

    @classmethod
    def joined(cls, each: Sequence[Awaited]) -> Awaited:
        """The batch rows of several, side by side; all of them `joins`."""
        most = max(one.q.shape[2] for one in each)
        each = [one._padded(most - one.q.shape[2]) for one in each]
        own = {name: together([getattr(one, name) for one in each]) for name in ("slots", "skip", *OF_ROWS)}
        first, last = (torch.cat(ends) for ends in zip(*(one.protected for one in each), strict=True))
        bounds = Bounds(*(together([*parts]) for parts in zip(*(one.bounds for one in each), strict=True)))
        storages, offsets = zip(*(one.chosen for one in each), strict=True)
        chosen = Storage.joined(storages), together([*offsets])
        return cls(protected=(first, last), bounds=bounds, chosen=chosen, **own)

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
