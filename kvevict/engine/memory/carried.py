"""The scores that slots carry from one eviction to the next (METHODS section 9): `EvictionLayer.carry`.

Carried scores are fp32 [B, Hkv, C], a column for each slot of a head, or None if no slot has a score. NaN stands for no
score: in columns after a head's last slot, and for slots stored since the last eviction by a chunk without observing
rows, while decoding, or as candidates of assisted decoding. C is at most the slot count of the fullest head. Missing
columns count as NaN, so the tensor need not change when slots are stored. After slots are removed or moved, `of_layer`,
or `kept` with fill=NaN, restores this form. Cache files contain all columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad


class Carrier(Protocol):
    """The part of `EvictionLayer` that this module uses."""

    carry: Tensor | None
    len: Tensor
    counts: np.ndarray
    longest: Callable[[], int]


# `Policy.carry` -> how a slot's new score and its carried score are joined; a carried NaN means no score.
JOIN = {
    "sum": lambda new, old: new + old.nan_to_num(0.0),
    "max": torch.fmax,
    "keep": lambda new, old: torch.where(old.isnan(), new, old),
}


def wide(carried: Tensor, columns: int) -> Tensor:
    """Pad carried scores [B, Hkv, C] with NaN to at least `columns` columns."""
    return pad(carried, (0, max(0, columns - carried.shape[-1])), value=torch.nan)


def join(carry: str, new: Tensor, carried: Tensor | None) -> Tensor | None:
    """Join new scores [B, Hkv, C] of the alive slots with the carried scores, by the rule `carry` of a policy."""
    if carry == "none":
        return None
    return new if carried is None else JOIN[carry](new, wide(carried, new.shape[-1]))


def kept(x: Tensor, index: Tensor, fill: float = 0) -> Tensor:
    """Gather x [B, Hkv, C] at the slots index [B, Hkv, K]; an index of -1 (no slot) gives `fill`."""
    return x.expand(-1, index.shape[1], -1).gather(2, index.clamp_min(0).long()).masked_fill(index < 0, fill)


def of_layer(numbers: Tensor | None, layer: Carrier) -> Tensor | None:
    """Bring carried scores [B, Hkv, *] of a layer's present slots into the form of `EvictionLayer.carry`: no column
    after the fullest head's last slot, and NaN after a shorter head's. None stays None."""
    if numbers is None:
        return None
    numbers = numbers[..., : layer.longest()]
    if (layer.counts >= numbers.shape[-1]).all():
        return numbers
    column = torch.arange(numbers.shape[-1], device=numbers.device)
    return numbers.masked_fill(column >= layer.len[..., None], torch.nan)


def carry_newest(layer: Carrier, numbers: Tensor) -> None:
    """Let the newest slot of head h in batch row b carry the score numbers[b, h, 0]."""
    width, known = layer.longest(), layer.carry
    if known is None:
        known = numbers.new_full((*numbers.shape[:2], width), torch.nan)
    layer.carry = wide(known, width).scatter(2, (layer.len - 1).long()[..., None], numbers)
