"""The archive of a layer: the slots of all tokens read, from which recall brings evicted slots back (docs/methods.md
section 13)."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...policy.run import Run
from . import host
from .awaited import Awaited
from .layer import EvictionLayer
from .mapped import Files, is_folder
from .meter import Meter
from .rows import Apart, joined
from .sequence import Sequence
from .storage import Storage


def put_aside(layer: EvictionLayer, awaited: Awaited) -> None:
    """Put the slots kept at the end of a prompt aside, so that the answer attends to the slots of all tokens.

    This lasts until the answer's own rows choose slots (`Policy.recall_after`), or until `settle` restores the kept
    slots. If the archive is in the host's memory, it stays there, and the answer attends to the kept slots."""
    assert layer.archive is not None
    if layer.archive.on_host:
        layer.awaited = replace(awaited, lse=None)
        return
    kept = layer.storage  # `len` and `counts` are copied below, since the cache's `Table` may overwrite the originals
    kept = replace(kept, len=kept.len.clone(), counts=kept.counts.copy())
    layer.awaited = replace(awaited, chosen=(kept, layer.head_offsets))
    _restore(layer, layer.archive)


def settle(sequence: Sequence, layers: Items[EvictionLayer]) -> None:
    """Restore the slots that `put_aside` put aside, followed by the slots of the answer's tokens, in layers whose
    answers have not chosen slots yet."""
    count, sequence.since = sequence.since, None
    if count is None:
        return
    for layer in layers:
        awaited, layer.awaited = layer.awaited, None
        if awaited is None or awaited.chosen is None:
            continue
        kept, layer.head_offsets = awaited.chosen
        since = layer.storage.aliased(awaited.at).last(count[awaited.at])
        settled = kept.moved(kept.grown(kept.counts + since.counts)).followed_by(since)
        others = [row for row in range(len(count)) if row not in awaited.at]
        if others:
            every = joined([settled, layer.storage.aliased(others)])
            settled = every.rows(np.argsort([*awaited.at, *others]).tolist())
        layer.storage = settled


def append(
    layer: EvictionLayer, k: Tensor, v: Tensor, pos: Tensor, first: Tensor, padding: np.ndarray,
    expected: int | np.ndarray = 0,
) -> None:  # fmt: skip
    """Append new columns to a layer's archive, with the arguments of `Storage.append`."""
    archive = _empty(layer) if layer.archive is None else layer.archive
    archive = archive.centred_as(layer.storage)
    if archive.on_host:  # pack the rows on the device where they were computed, then copy them to the host
        layer.archive = archive.with_all(_near(layer, archive).append(k, v, pos, first, padding), expected)
    else:
        layer.archive = archive.append(k, v, pos, first, padding, expected)


@torch.no_grad()
def represent(layer: EvictionLayer, kind: str, *seen: Any) -> None:
    """Prepare how a layer's archive packs rows, before a patched call attends: create the archive, which packs rows
    otherwise than the layer, or set the key centres of batch rows that have none yet. kind: a name in `kv.KINDS`
    (int8, ..); seen: the arguments of `EvictionLayer.represent` from `query` on."""
    if layer.archive is None:
        kinds, centre, known = layer.packing(kind, *seen)
        assert kinds is not None
        layer.archive = _empty(layer, layer.storage.none(kinds, centre, known))
    elif not layer.archive.is_centred:
        assert isinstance(layer.archive, Storage)  # not `Apart`: batch rows have centres before they are joined
        _, centre, known = layer.packing(None, *seen)
        layer.archive = layer.archive.centred_at(centre.to(layer.archive.device), known)
        layer.storage = layer.storage.centred_as(layer.archive)  # after a recall the layer has the archive's slots


def _near(layer: EvictionLayer, archive: Storage | Apart) -> Storage:
    """Create an empty storage on the layer's device that packs rows as an archive does."""
    if archive.kinds == layer.storage.kinds:
        return layer.storage.blank(None)
    each = archive.each if isinstance(archive, Apart) else [archive]
    return joined([one.blank_on(layer.device, False) for one in each])


def _on_host(layer: EvictionLayer) -> bool:
    """Whether the archive belongs in the host's memory while the layer's slots are on another device."""
    return isinstance(layer.sequence.run.archive, str) and host.is_away(layer.storage.device)


def _files(layer: EvictionLayer) -> Files | None:
    place = layer.sequence.run.archive
    return Files(str(place)) if is_folder(place) else None


def _empty(layer: EvictionLayer, like: Storage | None = None) -> Storage:
    """Create an empty archive for slots like those of `like` (None: of the layer). If the archive and the layer's
    prefix are both in the host's memory, the archive begins with this prefix."""
    files, storage = _files(layer), like or layer.storage
    if not _on_host(layer):
        return storage.blank(files)
    return storage.blank_on(torch.device("cpu"), True, files, storage.prefix if storage.far else None)


def append_last(layer: EvictionLayer) -> None:
    """Append the slots of the tokens since the last read to a layer's archive; a new archive gets all the layer's
    slots."""
    storage = layer.storage
    if layer.archive is not None:
        layer.archive = _with_last(layer, _in_place(layer, layer.archive))
    elif _on_host(layer):
        layer.archive = _empty(layer).with_all(replace(storage, prefix=None) if storage.far else storage.gathered())
        host.wait()  # for the copy, since decoding may move the layer's slots
    else:
        layer.storage = storage.as_prefix()
        layer.archive, files = layer.storage.forked(), _files(layer)
        if files is not None:
            layer.archive.pool = files  # slots of later tokens go to buffers in files


def _in_place(layer: EvictionLayer, archive: Storage | Apart) -> Storage | Apart:
    """Return a layer's archive, moved to the memory (host or device) that the running read asks for."""
    if archive.on_host == _on_host(layer):
        return archive
    slots = archive.gathered()
    if slots.on_host:
        return _here(layer, slots).whole()
    moved = slots.blank_on(torch.device("cpu"), True).with_all(slots)
    host.wait()
    return moved


def begin(sequence: Sequence, layers: Items[EvictionLayer], recall: bool, run: Run) -> None:
    """Prepare the archives before tokens are read: append the slots of the tokens decoded since the last read, or drop
    the archives if `recall` is False."""
    settle(sequence, layers)
    sequence.run = run
    for layer in layers:
        if not recall:
            layer.archive = None  # this read writes no archive, so an old one would lack its tokens
        elif layer.is_initialized:
            append_last(layer)
    sequence.archived = sequence.columns


def whole(layer: EvictionLayer) -> Storage:
    """Return the slots of all tokens for a fork: a layer's archive, then the slots of the tokens since the last
    read."""
    assert layer.archive is not None
    return _here(layer, _with_last(layer, _forked(layer.archive)))


def every(layer: EvictionLayer) -> list[Storage | Apart]:
    """Return the slots of all tokens, for reading only, as a list of storages in the order of their tokens. A layer
    without an archive returns its own slots."""
    if layer.archive is None:
        return [layer.storage]
    count = layer.sequence.columns - layer.sequence.archived
    archive = layer.archive.centred_as(layer.storage)
    if archive.on_host:
        host.wait()  # for rows that are still on their way to the archive
    return [archive, _last(layer, archive, count)] if count else [archive]


def _forked(archive: Storage | Apart) -> Storage:
    return archive.gathered().forked() if isinstance(archive, Apart) else archive.forked()


def _with_last(layer: EvictionLayer, archive: Any) -> Any:
    """Append the slots of the tokens since the last read to an archive, which is a `Storage` or an `Apart`."""
    count = layer.sequence.columns - layer.sequence.archived
    if not count:
        return archive
    archive = archive.centred_as(layer.storage)
    archive = archive.with_all(_last(layer, archive, count))
    if archive.on_host:
        host.wait()  # for the copy: next, the layer may move its slots, and the host may read the archive
    return archive


def _last(layer: EvictionLayer, archive: Storage | Apart, count: int) -> Storage:
    """Return the layer's last `count` slots of each head, packed as the archive packs its rows."""
    last = layer.storage.last(count)
    return last if archive.kinds == last.kinds else _near(layer, archive).with_all(last)


def _here(layer: EvictionLayer, archive: Storage) -> Storage:
    """Return an archive for use on the layer's device. If it is in the host's memory, return an empty storage on the
    device with the archive as its prefix."""
    return archive.blank_on(layer.device, False, layer.pool, archive) if archive.on_host else archive


def recall(layer: EvictionLayer, due: np.ndarray) -> None:
    """Replace the kept slots by the slots of all tokens, until the next cut, in batch rows b with due[b] True."""
    every = layer.archive
    assert every is not None
    if every.on_host:
        host.wait()  # this step's decoded row must arrive in the archive before the host moves it
    if not due.all() or isinstance(every, Apart):
        rows = zip(due, Apart.of([every]).each, Apart.of([layer.storage]).each, strict=True)
        every = joined([_alike(_here(layer, archived), kept) if recalls else kept for recalls, archived, kept in rows])
    _restore(layer, every if every.on_host else every.gathered())
    layer.storage.fetch()


def _alike(archived: Storage, kept: Storage) -> Storage:
    """Return the slots of one batch row's archive, packed in the same way as the row's kept slots."""
    return archived if archived.kinds == kept.kinds else kept.blank(None).with_all(archived.gathered())


def _restore(layer: EvictionLayer, archive: Storage | Apart) -> None:
    layer.storage, layer.head_offsets = _here(layer, _forked(archive)), None


def recall_all(layers: Items[EvictionLayer], meter: Meter, always: bool) -> None:
    """Replace every layer's slots by those of its archive, if all layers have archives and either `always` or some
    layer has lost slots. The meter notes the slots before and after. An archive that has a prefix is copied into one
    buffer only when its layer attends, so that only one layer at a time has a copy."""
    archives = [layer.archive for layer in layers if layer.archive is not None]
    if len(archives) < len(layers):
        return
    lost = any((one.total_counts > layer.counts).any() for one, layer in zip(archives, layers, strict=True))
    if not (lost or always):
        return
    kept = [layer.positions() for layer in layers] if lost else []
    with meter.clock("recall"):
        for layer, archive in zip(layers, archives, strict=True):
            _restore(layer, archive)
    if lost:
        meter.recalls = [(before, layer.positions()) for before, layer in zip(kept, layers, strict=True)]
