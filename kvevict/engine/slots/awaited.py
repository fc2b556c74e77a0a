"""What a layer has beside the slots of all tokens while an answer attends to these (`Policy.recall_after`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...policy.seen.slots import Bounds
from .storage import Storage, together


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

    def with_row(self, q: Tensor, out: Tensor, lse: Tensor) -> Awaited:
        """With a row of the answer, q [B, H, 1, D], out [B, 1, H, D] and lse [B, H, 1]."""
        outs = None if self.out is None else torch.cat([self.out, out], 1)
        sums = None if self.lse is None else torch.cat([self.lse, lse], 2)
        return replace(self, q=torch.cat([self.q, q], 2), out=outs, lse=sums)

    def crop(self, count: int) -> Awaited:
        """Without the last `count` rows."""
        left = self.q.shape[2] - count
        out = None if self.out is None else self.out[:, :left]
        lse = None if self.lse is None else self.lse[:, :, :left]
        return replace(self, q=self.q[:, :, :left], out=out, lse=lse)

    def rows(self, chosen: Tensor) -> Awaited:
        """With batch rows chosen [N], as of `Storage.rows`."""
        at, kept = chosen.tolist(), self.chosen
        if kept is not None:
            offsets = None if kept[1] is None else kept[1][at]
            kept = kept[0].rows(chosen), offsets
        own = (self.protected, self.bounds, self.skip, self.q, self.out, self.lse)
        ends, bounds, skip, q, out, lse = (_rows(each, chosen) for each in own)
        return Awaited(self.slots[at], ends, Bounds(*bounds), skip, q, out, lse, kept)

    @classmethod
    def joined(cls, each: Sequence[Awaited]) -> Awaited:
        """The batch rows of several, side by side; all of them `joins`."""
        most = max(one.q.shape[2] for one in each)
        after = [most - one.q.shape[2] for one in each]
        qs = [torch.nn.functional.pad(one.q, (0, 0, gap, 0)) for one, gap in zip(each, after, strict=True)]
        outs = [one.out for one in each if one.out is not None]
        outs = [torch.nn.functional.pad(out, (0, 0, 0, 0, most - out.shape[1], 0)) for out in outs]
        lses = [one.lse for one in each if one.lse is not None]  # all of them: none has chosen slots alone
        lses = [torch.nn.functional.pad(lse, (gap, 0)) for lse, gap in zip(lses, after, strict=True)]
        first, last = (torch.cat(ends) for ends in zip(*(one.protected for one in each), strict=True))
        bounds = Bounds(*(together([*parts]) for parts in zip(*(one.bounds for one in each), strict=True)))
        skip = torch.cat([one.skip + gap for one, gap in zip(each, after, strict=True)])
        slots = np.concatenate([one.slots for one in each])
        storages, offsets = zip(*(one.chosen for one in each), strict=True)
        chosen = Storage.joined(storages), together([*offsets])
        out = torch.cat(outs) if outs else None
        return cls(slots, (first, last), bounds, skip, torch.cat(qs), out, torch.cat(lses), chosen)

    def joins(self, other: Awaited) -> bool:
        """Whether the rows of both can be side by side."""
        mine, yours = ([one.chosen and one.chosen[1], *one.bounds, one.out] for one in (self, other))
        alike = all((x is None) == (y is None) for x, y in zip(mine, yours, strict=True))
        return alike and self.chosen is not None and other.chosen is not None

    def tensors(self) -> tuple:
        """All tensors."""
        own = () if self.chosen is None else self.chosen[0].tensors()
        return *own, *self.protected, *self.bounds, self.skip, self.q, self.out, self.lse


def _rows(each: Any, chosen: Tensor) -> Any:
    """Batch rows of a tensor, of None or of several of these."""
    if isinstance(each, tuple):
        return tuple(_rows(one, chosen) for one in each)
    return None if each is None else each[chosen]
