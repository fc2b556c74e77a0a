"""The numbers that slots carry from one eviction to the next (METHODS section 9), `EvictionLayer.carry`.

They are fp32 [B, Hkv, C], or None where no slot has a number. A slot without one has NaN: it was stored since, by a
chunk without observing rows, while decoding, or as a candidate. Columns past a head's end are NaN, and C is at most the
fullest head's slot count; missing columns count as NaN. So a layer may store slots and leave its numbers as they are.
Every removal or move of slots ends in `of_layer`, or in `kept` with NaN. A file has all columns (`wide`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

if TYPE_CHECKING:
    from .layer import EvictionLayer

# Joins new and carried numbers of slots; a slot that carries none has NaN.
JOIN = {
    "sum": lambda new, old: new + old.nan_to_num(0.0),
    "max": torch.fmax,
    "keep": lambda new, old: torch.where(old.isnan(), new, old),
}


def wide(carried: torch.Tensor, columns: int) -> torch.Tensor:
    """Carried numbers, padded with NaN to at least so many columns."""
    return pad(carried, (0, max(0, columns - carried.shape[-1])), value=torch.nan)


def join(carry: str, new: torch.Tensor, carried: torch.Tensor | None) -> torch.Tensor | None:
    """New numbers [B, Hkv, C] of all alive slots, joined with the carried ones of the first; None: no carrying."""
    if carry == "none":
        return None
    return new if carried is None else JOIN[carry](new, wide(carried, new.shape[-1]))


def kept(x: torch.Tensor, index: torch.Tensor, fill: float = 0) -> torch.Tensor:
    """Take x [B, Hkv, C] at the slots index [B, Hkv, K]; `fill` where the index is -1."""
    return x.expand(-1, index.shape[1], -1).gather(2, index.clamp_min(0).long()).masked_fill(index < 0, fill)


def of_layer(numbers: torch.Tensor | None, layer: EvictionLayer) -> torch.Tensor | None:
    """Numbers [B, Hkv, *] of a layer's present slots, in the form that it carries; None for None."""
    if numbers is None:
        return None
    numbers = numbers[..., : layer.longest()]
    if (layer.counts >= numbers.shape[-1]).all():
        return numbers
    column = torch.arange(numbers.shape[-1], device=numbers.device)
    return numbers.masked_fill(column >= layer.len[..., None], torch.nan)


def carry_newest(layer: EvictionLayer, numbers: torch.Tensor) -> None:
    """The newest slot of each head carries its number: numbers [B, Hkv, 1]."""
    width, known = layer.longest(), layer.carry
    if known is None:
        known = numbers.new_full((*numbers.shape[:2], width), torch.nan)
    layer.carry = wide(known, width).scatter(2, (layer.len - 1).long()[..., None], numbers)
