"""The slots of all tokens of one layer, for recall: where they lie, and how they are packed. tiers.py says when a layer
attends to them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import host
from .layer import EvictionLayer
from .mapped import Files, is_folder
from .rows import Apart, joined
from .storage import Storage

Every = Storage | Apart  # `Apart`: of batch rows that came from several caches


def is_away(layer: EvictionLayer) -> bool:
    """Whether the slots belong in the host's memory while those that the layer keeps are on another device."""
    return isinstance(layer.sequence.run.archive, str) and host.is_away(layer.storage.device)


def _files(layer: EvictionLayer) -> Files | None:
    place = layer.sequence.run.archive
    return Files(str(place)) if is_folder(place) else None


def empty(layer: EvictionLayer, like: Storage | None = None) -> Storage:
    """Create an empty storage for slots like those of `like` (None: of the layer). If the slots belong in the host's
    memory, and the layer's prefix is there, too, the storage begins with this prefix."""
    files, storage = _files(layer), like or layer.storage
    if not is_away(layer):
        return storage.blank(files)
    return storage.blank_on(torch.device("cpu"), True, files, storage.prefix if storage.far else None)


def begun(layer: EvictionLayer) -> Storage:
    """Return the slots that the layer keeps as the first slots of all tokens."""
    storage = layer.storage
    if is_away(layer):
        slots = empty(layer).with_all(replace(storage, prefix=None) if storage.far else storage.gathered())
        host.wait()  # for the copy, since decoding may move the layer's slots
        return slots
    slots, files = layer.shared(), _files(layer)
    if files is not None:
        slots.pool = files  # slots of later tokens go to buffers in files
    return slots


def appended(
    layer: EvictionLayer, every: Every, k: Tensor, v: Tensor, pos: Tensor, first: Tensor, padding: np.ndarray,
    expected: int | np.ndarray,
) -> Every:  # fmt: skip
    """Append new columns, with the arguments of `Storage.append`."""
    every = every.centred_as(layer.storage)
    if every.on_host:  # pack the rows on the device where they were computed, then copy them to the host
        return every.with_all(_near(layer, every).append(k, v, pos, first, padding), expected)
    return every.append(k, v, pos, first, padding, expected)


def followed(layer: EvictionLayer, every: Any, count: int) -> Any:
    """Append the slots of the last `count` tokens to `every`, a `Storage` or an `Apart`."""
    if not count:
        return every
    every = every.centred_as(layer.storage)
    every = every.with_all(last(layer, every, count))
    if every.on_host:
        host.wait()  # for the copy: next, the layer may move its slots, and the host may read these
    return every


def last(layer: EvictionLayer, every: Every, count: int) -> Storage:
    """Return the layer's last `count` slots of each head, packed as `every` packs its rows."""
    storage, own = layer.storage, np.minimum(count, layer.storage.counts)
    slots = storage.last(count if storage.far else own)
    if storage.prefix is not None and not storage.far and (own < count).any():  # a fork, which has decoded since
        before = replace(storage.prefix.last(count - own), pool=None)
        slots = before.moved(before.counts + own).followed_by(slots)
    return slots if every.kinds == slots.kinds else _near(layer, every).with_all(slots)


def _near(layer: EvictionLayer, every: Every) -> Storage:
    """Create an empty storage on the layer's device that packs rows as `every` does."""
    if every.kinds == layer.storage.kinds:
        return layer.storage.blank(None)
    each = every.each if isinstance(every, Apart) else [every]
    return joined([one.blank_on(layer.device, False) for one in each])


def in_place(layer: EvictionLayer, every: Every) -> Every:
    """Return the slots, moved to the memory (host or device) that the running read asks for."""
    if every.on_host == is_away(layer):
        return every
    slots = every.gathered()
    if slots.on_host:
        return here(layer, slots).whole()
    moved = slots.blank_on(torch.device("cpu"), True).with_all(slots)
    host.wait()
    return moved


def forked(every: Every) -> Storage:
    return every.gathered().forked() if isinstance(every, Apart) else every.forked()


def here(layer: EvictionLayer, slots: Storage) -> Storage:
    """Return a fork of all tokens' slots for the layer to attend to. If it is in the host's memory, the layer gets an
    empty storage with the fork as its prefix."""
    return slots.blank_on(layer.device, False, layer.pool, slots) if slots.on_host else slots


def before(layer: EvictionLayer, every: Every) -> Storage:
    """Return a storage on the layer's device that begins with the slots, which stay where they are, if need be in
    several parts."""
    slots = every.gathered().fixed() if isinstance(every, Apart) else every.fixed()
    if slots.far:
        return slots.forked()
    return here(layer, slots) if slots.on_host else slots.blank(slots.pool, slots)


def here_in(layer: EvictionLayer, every: Every, due: np.ndarray) -> Storage:
    """Return a fork of the slots for the layer to attend to in batch rows b with due[b] True; other batch rows go on
    with the slots that they keep."""
    if due.all() and isinstance(every, Storage):
        return here(layer, forked(every if every.on_host else every.gathered()))
    each = zip(due, Apart.of([every]).each, Apart.of([layer.storage]).each, strict=True)
    rows = joined([_alike(here(layer, slots), kept) if recalls else kept for recalls, slots, kept in each])
    return here(layer, forked(rows if rows.on_host else rows.gathered()))


def _alike(slots: Storage, kept: Storage) -> Storage:
    """Return one batch row's slots of all tokens, packed in the same way as the row's kept slots."""
    return slots if slots.kinds == kept.kinds else kept.blank(None).with_all(slots.gathered())
