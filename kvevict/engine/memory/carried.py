"""The numbers that slots carry from one eviction to the next (METHODS section 9), `EvictionLayer.carry`.

They are fp32 [B, Hkv, C], or None if no slot has a number. Slots without a number have NaN: those stored since by a
chunk without observing rows, while decoding, or as candidates. Columns after a head's last slot are NaN. C is at most
the fullest head's slot count; missing columns count as NaN, so slots can be stored without a change of the numbers.
After slots are removed or moved, `of_layer`, or `kept` with NaN, restores this form. Cache files have all columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad


class Carrier(Protocol):
    """What is needed here of an `EvictionLayer`."""

    carry: Tensor | None
    len: Tensor
    counts: np.ndarray
    longest: Callable[[], int]


# How new and carried numbers of slots are joined; a slot that carries none has NaN.
JOIN = {
    "sum": lambda new, old: new + old.nan_to_num(0.0),
    "max": torch.fmax,
    "keep": lambda new, old: torch.where(old.isnan(), new, old),
}


def wide(carried: Tensor, columns: int) -> Tensor:
    """Pad carried numbers with NaN to at least `columns` columns."""
    return pad(carried, (0, max(0, columns - carried.shape[-1])), value=torch.nan)


def join(carry: str, new: Tensor, carried: Tensor | None) -> Tensor | None:
    """Join new numbers [B, Hkv, C] of alive slots with the carried ones, as the policy's `carry` says."""
    if carry == "none":
        return None
    return new if carried is None else JOIN[carry](new, wide(carried, new.shape[-1]))


def kept(x: Tensor, index: Tensor, fill: float = 0) -> Tensor:
    """Take x [B, Hkv, C] at the slots index [B, Hkv, K]; `fill` where the index is -1."""
    return x.expand(-1, index.shape[1], -1).gather(2, index.clamp_min(0).long()).masked_fill(index < 0, fill)


def of_layer(numbers: Tensor | None, layer: Carrier) -> Tensor | None:
    """Bring numbers [B, Hkv, *] of a layer's present slots into the form of `carry`; None stays None."""
    if numbers is None:
        return None
    numbers = numbers[..., : layer.longest()]
    if (layer.counts >= numbers.shape[-1]).all():
        return numbers
    column = torch.arange(numbers.shape[-1], device=numbers.device)
    return numbers.masked_fill(column >= layer.len[..., None], torch.nan)


def carry_newest(layer: Carrier, numbers: Tensor) -> None:
    """Let the newest slot of each head carry its number, numbers [B, Hkv, 1]."""
    width, known = layer.longest(), layer.carry
    if known is None:
        known = numbers.new_full((*numbers.shape[:2], width), torch.nan)
    layer.carry = wide(known, width).scatter(2, (layer.len - 1).long()[..., None], numbers)
