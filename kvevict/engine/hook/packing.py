"""Padding and positions of a batch's tokens. The engine reads every batch row with its padding at the left."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from ...models import families, rotary


class Packing:
    """Moves the padding of a call's new tokens [B, N] to the left. The argument mask [B, N] is the attention mask of
    these tokens; None: no padding.

    first     int32 [B] number of padding columns of each batch row
    padding   `first` on the host
    place     [B, N] the column to which each column is moved; None: all padding is at the left already
    """

    def __init__(self, mask: torch.Tensor | None, batch: int, device: torch.device) -> None:
        self.first = torch.zeros(batch, dtype=torch.int32, device=device)
        self.padding, self.place = np.zeros(batch, np.int64), None
        if mask is None:
            return
        mask = mask.bool()
        self.first, self.padding, holes = padding_of(mask)
        if holes:
            self.order = mask.int().argsort(dim=1, stable=True)  # each row's padding, then its tokens in order
            self.place = (self.first[:, None] + mask.cumsum(1) - 1).clamp_min(0)

    def pack(self, x: Any, dim: int = 1) -> Any:
        """Return x with the padding among its columns (dimension `dim`) moved to the left; x may be None."""
        return x if x is None or self.place is None else _take(x, self.order, dim)

    def unpack(self, output: Any) -> None:
        """Move the rows of a model's output, in place, back to the columns of the unpacked input. A padding column
        after a token gets that token's row."""
        if self.place is None:
            return
        for name in ("last_hidden_state", "logits"):
            rows = getattr(output, name, None)
            if rows is not None:
                place = self.place[:, -rows.shape[1] :] - (self.place.shape[1] - rows.shape[1])
                output[name] = _take(rows, place.clamp_min(0), 1)


def padding_of(mask: torch.Tensor) -> tuple[torch.Tensor, np.ndarray, bool]:
    """(number of zeros in each row of a 2D mask, int32 [B]; the same numbers on the host; whether a zero follows a one
    in any row)."""
    mask = mask.bool()
    zeros = (~mask).sum(1)
    *padding, holes = torch.cat([zeros, (mask.int().diff(dim=1) < 0).any()[None]]).tolist()
    return zeros.to(torch.int32), np.array(padding), bool(holes)


def packed_mask(mask: torch.Tensor, spans: Iterable[tuple[int, int]]) -> torch.Tensor:
    """Return mask [B, columns] with the zeros within each span of columns (start, stop) moved to the span's left."""
    for start, stop in spans:
        mask = torch.cat([mask[:, :start], mask[:, start:stop].sort(1).values, mask[:, stop:]], 1)
    return mask


def _take(x: torch.Tensor, columns: torch.Tensor, dim: int) -> torch.Tensor:
    """Reorder x along its dimension `dim` by the indices `columns` [B, N], each batch row by its own. The batch
    dimension of x is the one before `dim`."""
    rest = x.ndim - 1 if dim == -1 else 1
    index = columns.to(x.device)
    index = index.view(*(1,) * (rest - 1), *index.shape, *(1,) * (x.ndim - rest - 1))
    return x.gather(rest, index.expand(*x.shape[:rest], columns.shape[1], *x.shape[rest + 1 :]))


class Positions:
    """The positions of a call's new tokens [B, N], as the decoder's argument `ids` (position_ids): [1 or B, N], or
    [axes, 1 or B, N] for pictures (M-RoPE).

    With ids=None tokens are numbered from `columns` on, the number of columns that the cache has seen; a decoder that
    leaves padding out of its numbering (OPT) gets numbers counted from mask [B, columns + N]. Raises ValueError for ids
    of another shape.
    """

    def __init__(
        self, decoder: Any, ids: torch.Tensor | None, packing: Packing, mask: torch.Tensor | None, columns: int,
        tokens: int,
    ) -> None:  # fmt: skip
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
        """One position per token [B, N], non-decreasing: with several axes (pictures), a token's largest position."""
        batch = len(self.packing.first)
        if self.ids.ndim == 2:
            return self.ids.expand(batch, -1)
        padding = torch.arange(self.ids.shape[-1], device=self.ids.device) < self.packing.first[:, None]
        return self.ids[-self.axes :].amax(0).masked_fill(padding, 0).cummax(1).values

    def follow(self, next_position: torch.Tensor) -> None:
        """Increase the positions of each batch row so that its first token has at least position next_position [B].
        `generate` counts positions on from the previous column, which may be padding."""
        batch, tokens = len(self.packing.first), self.ids.shape[-1]
        first = self.packing.first.long().clamp_max(tokens - 1)[:, None]
        late = (next_position[:, None] - self.tokens().gather(1, first)).clamp_min(0)
        self.ids = self.ids.expand(*self.ids.shape[:-2], batch, -1) + late

    def chunk(self, start: int, end: int, positions: torch.Tensor) -> torch.Tensor:
        """The decoder's position_ids for columns start .. end - 1 and the rows appended after them. positions [B, T]:
        one position for each of these columns and rows."""
        if self.ids.ndim == 2:
            return positions
        own = self.ids[..., start:end].expand(-1, len(positions), -1)
        appended = positions[:, end - start :].expand(len(own), -1, -1)
        return torch.cat([own, appended], -1)
