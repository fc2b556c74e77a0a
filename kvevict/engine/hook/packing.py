"""Padding and positions of a batch's tokens. Rows are read with their padding at the left."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from ...models import families, rotary


class Packing:
    """Padding of the new tokens [B, N] of a call, by their part of the attention mask (None: no padding).

    first     [B] int32 number of padding columns of each row, moved to its left
    padding   the same on the host
    place     [B, N] new place of every column; None: padding was at the left already
    """

    def __init__(self, mask: Any, batch: int, device: torch.device) -> None:
        self.first = torch.zeros(batch, dtype=torch.int32, device=device)
        self.padding, self.place = np.zeros(batch, np.int64), None
        if mask is None:
            return
        mask = mask.bool()
        self.first, self.padding, holes = padding_of(mask)
        if holes:
            self.order = mask.int().argsort(dim=1, stable=True)  # padding first, then the tokens in their order
            self.place = (self.first[:, None] + mask.cumsum(1) - 1).clamp_min(0)

    def pack(self, x: torch.Tensor | None, dim: int = 1) -> Any:
        """Put the columns [B, N] of x, dimension `dim`, in reading order; None for None."""
        return x if x is None or self.place is None else _take(x, self.order, dim)

    def unpack(self, output: Any) -> None:
        """Put output rows back in the caller's columns; padding after a token gets that token's row."""
        if self.place is None:
            return
        for name in ("last_hidden_state", "logits"):
            rows = getattr(output, name, None)
            if rows is not None:
                place = self.place[:, -rows.shape[1] :] - (self.place.shape[1] - rows.shape[1])
                output[name] = _take(rows, place.clamp_min(0), 1)


def padding_of(mask: torch.Tensor) -> tuple[torch.Tensor, np.ndarray, bool]:
    """[B] int32 number of zeros of a 2D mask, the same on the host, and True if a zero comes after a one."""
    mask = mask.bool()
    zeros = (~mask).sum(1)
    *padding, holes = torch.cat([zeros, (mask.int().diff(dim=1) < 0).any()[None]]).tolist()
    return zeros.to(torch.int32), np.array(padding), bool(holes)


def packed_mask(mask: torch.Tensor, spans: Iterable[tuple[int, int]]) -> torch.Tensor:
    """A mask [B, columns] in reading order: the padding of each (start, stop) span of columns at its left."""
    for start, stop in spans:
        mask = torch.cat([mask[:, :start], mask[:, start:stop].sort(1).values, mask[:, stop:]], 1)
    return mask


def _take(x: Any, columns: Any, dim: int) -> Any:
    """Put the columns of x in the order `columns` [B, N]. Columns are dimension `dim`, batch rows the one before."""
    rest = x.ndim - 1 if dim == -1 else 1
    index = columns.to(x.device)
    index = index.view(*(1,) * (rest - 1), *index.shape, *(1,) * (x.ndim - rest - 1))
    return x.gather(rest, index.expand(*x.shape[:rest], columns.shape[1], *x.shape[rest + 1 :]))


class Positions:
    """Positions of the new tokens [B, N] of a call: `ids` [1 or B, N], or several axes of them, as the decoder takes.

    Raises ValueError for ids of another shape.
    """

    def __init__(
        self, decoder: torch.nn.Module, ids: Any, packing: Packing, mask: Any, columns: int, tokens: int
    ) -> None:
        """ids None: tokens are counted from `columns`, the number that the cache has seen, or by the mask
        [B, columns + N] if the decoder does so."""
        device, batch = packing.first.device, len(packing.first)
        if ids is None and mask is not None and families.counts_tokens(decoder):
            ids = (mask.long().cumsum(1) - 1).clamp_min(0)[:, columns:]
        elif ids is None:
            ids = torch.arange(columns, columns + tokens, device=device)[None]
        if packing.place is not None:
            ids = packing.pack(ids.expand(*ids.shape[:-2], batch, -1), -1)
        self.ids, self.packing = ids, packing
        self.axes = rotary.axes(decoder) if ids.ndim == 3 else 0
        if ids.ndim != 2 and not self.axes:
            raise ValueError("position_ids must be [batch, tokens]")

    def tokens(self) -> torch.Tensor:
        """[B, N], never decreasing. Of several axes (pictures) the largest counts."""
        batch = len(self.packing.first)
        if self.ids.ndim == 2:
            return self.ids.expand(batch, -1)
        padding = torch.arange(self.ids.shape[-1], device=self.ids.device) < self.packing.first[:, None]
        return self.ids[-self.axes :].amax(0).masked_fill(padding, 0).cummax(1).values

    def follow(self, next_position: torch.Tensor) -> None:
        """Continue each row at next_position [B]: generate counts from the last column, possibly padding."""
        batch, tokens = len(self.packing.first), self.ids.shape[-1]
        first = self.packing.first.long().clamp_max(tokens - 1)[:, None]
        late = (next_position[:, None] - self.tokens().gather(1, first)).clamp_min(0)
        self.ids = self.ids.expand(*self.ids.shape[:-2], batch, -1) + late

    def chunk(self, start: int, end: int, positions: torch.Tensor) -> torch.Tensor:
        """The decoder's position_ids for columns start..end-1 and the rows after them, at positions [B, S] in all."""
        if self.ids.ndim == 2:
            return positions
        own = self.ids[..., start:end].expand(-1, len(positions), -1)
        appended = positions[:, end - start :].expand(len(own), -1, -1)
        return torch.cat([own, appended], -1)
