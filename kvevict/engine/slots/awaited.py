"""What a layer has beside the slots of all tokens while answers attend to these (`Policy.recall_after`)."""

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

    def with_row(self, q: Tensor, out: Tensor, lse: Tensor) -> Awaited:
        """With a row of the answers, of q [B, H, 1, D], out [B, 1, H, D] and lse [B, H, 1]."""
        if len(self.at) < len(q):
            q, out, lse = q[self.at], out[self.at], lse[self.at]
        outs = None if self.out is None else torch.cat([self.out, out], 1)
        sums = None if self.lse is None else torch.cat([self.lse, lse], 2)
        return replace(self, q=torch.cat([self.q, q], 2), out=outs, lse=sums)

    def crop(self, count: int) -> Awaited:
        """Without the last `count` rows."""
        left = self.q.shape[2] - count
        out = None if self.out is None else self.out[:, :left]
        lse = None if self.lse is None else self.lse[:, :, :left]
        return replace(self, q=self.q[:, :, :left], out=out, lse=lse)

    def rows(self, rows: list[int]) -> Awaited | None:
        """With these batch rows, as of `Storage.rows`. None: all of them have chosen."""
        number, kept = {row: n for n, row in enumerate(self.at)}, self.chosen
        at = [place for place, row in enumerate(rows) if row in number]
        if not at:
            return None
        mine = [number[rows[place]] for place in at]
        chosen = torch.tensor(mine, device=self.q.device)
        if kept is not None:
            kept = kept[0].rows(chosen), None if kept[1] is None else kept[1][mine]
        own = (self.protected, self.bounds, self.skip, self.q, self.out, self.lse)
        ends, bounds, skip, q, out, lse = (_rows(each, chosen) for each in own)
        return Awaited(at, self.slots[mine], ends, Bounds(*bounds), skip, q, out, lse, kept)

    def moved(self, start: int) -> Awaited:
        """With batch rows that follow `start` others."""
        return replace(self, at=[start + row for row in self.at])

    @classmethod
    def joined(cls, each: Sequence[Awaited]) -> Awaited:
        """The batch rows of several, one after the other; all of them `joins`."""
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
        out, at = torch.cat(outs) if outs else None, [row for one in each for row in one.at]
        return cls(at, slots, (first, last), bounds, skip, torch.cat(qs), out, torch.cat(lses), chosen)

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
