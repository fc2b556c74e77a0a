"""The archive of a layer: the slots of all tokens read, for recall (docs/methods.md section 13). A `layer` is a
`kvevict.engine.memory.layer.EvictionLayer`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ...policy.kv import Kinds
from . import host
from .awaited import Awaited
from .mapped import Files, is_folder
from .storage import Storage, together
from .stored import Stored

if TYPE_CHECKING:
    from .layer import EvictionLayer


@dataclass
class Apart:
    """The archives of batch rows that decode together, one for each: rows join and leave without a copy of them. The
    methods are those of a `Storage`, but nothing is expected of a row alone."""

    each: list[Storage]

    total_counts = property(lambda self: np.concatenate([one.total_counts for one in self.each]))
    device = property(lambda self: self.each[0].device)
    kinds = property(lambda self: self.each[0].kinds)
    on_host = property(lambda self: self.each[0].on_host)
    centre = property(lambda self: together([one.centre for one in self.each]))
    is_centred = property(lambda self: all(one.is_centred for one in self.each))

    def append(
        self, k: Tensor, v: Tensor, pos: Tensor, first: Tensor, padding: np.ndarray, expected: object = 0
    ) -> Apart:
        rows = [slice(row, row + 1) for row in range(len(self.each))]
        return Apart(
            [one.append(k[r], v[r], pos[r], first[r], padding[r]) for one, r in zip(self.each, rows, strict=True)]
        )

    def centred_as(self, other: Storage) -> Apart:
        return Apart([one.centred_as(row) for one, row in self._beside(other)])

    def with_all(self, other: Storage, expected: object = 0) -> Apart:
        return Apart([one.with_all(row) for one, row in self._beside(other)])

    def as_prefix(self) -> Apart:
        return self  # each row's archive has one

    def crop(self, count: int) -> Apart:
        return Apart([one.crop(count) for one in self.each])

    def rows(self, chosen: Tensor) -> Storage | Apart:
        found = [self.each[row].forked() for row in chosen.tolist()]
        return found[0] if len(found) == 1 else Apart(found)

    def forked(self) -> Apart:
        return Apart([one.forked() for one in self.each])

    def gathered(self) -> Storage:
        return Storage.joined(self.each).gathered()

    def places(self, b: int, h: int) -> list[tuple[Stored, slice]]:
        return self.each[b].places(0, h)

    def tensors(self) -> tuple:
        return tuple(tensor for one in self.each for tensor in one.tensors())

    def _beside(self, other: Storage) -> Any:
        """Each row's archive, and its row of another storage."""
        rows = torch.arange(len(self.each), device=other.device)
        return zip(self.each, (other.aliased(at[None], [row]) for row, at in enumerate(rows)), strict=True)


def apart(archives: Sequence[Storage | Apart]) -> Apart:
    """The archives of several caches, row by row."""
    each: list = []
    for archive in archives:
        rows = torch.arange(len(archive.total_counts), device=archive.device)
        each += archive.each if isinstance(archive, Apart) else [archive.forked().rows(row[None]) for row in rows]
    return Apart(each)


def put_aside(layer: EvictionLayer, awaited: Awaited) -> None:
    """After a prompt: the answer attends to the slots of all tokens, if these are on the layer's device, in place of
    those that the prompt's rows chose, until `settle` or until its own rows choose."""
    assert layer.archive is not None
    if not layer.archive.on_host:
        kept = layer.storage  # its counts may lie in the cache's table, which counts other slots from here on
        kept = replace(kept, len=kept.len.clone(), counts=kept.counts.copy())
        awaited = replace(awaited, chosen=(kept, layer.head_offsets))
        _restore(layer, layer.archive)
    else:
        awaited = replace(awaited, lse=None)
    layer.awaited = awaited


def settle(sequence: Any, layers: Sequence[EvictionLayer]) -> None:
    """Where answers have ended or are not to choose: their layers have the slots that the prompt's rows chose, and
    those since."""
    count, sequence.since = sequence.since, None
    for layer in layers if count is not None else ():
        awaited, layer.awaited = layer.awaited, None
        if awaited is not None and awaited.chosen is not None:
            kept, layer.head_offsets = awaited.chosen
            since = _rows(layer, awaited.at).last(count[awaited.at])
            settled = kept.moved(kept.grown(kept.counts + since.counts)).followed_by(since)
            others = [row for row in range(len(count)) if row not in awaited.at]
            if others:
                every = Storage.joined([settled, _rows(layer, others)])
                settled = every.rows(torch.tensor([*awaited.at, *others]).argsort())
            layer.storage = settled


def _rows(layer: EvictionLayer, rows: list[int]) -> Storage:
    """View batch rows of a layer's slots."""
    return layer.storage.aliased(torch.tensor(rows, device=layer.device), rows)


def append(layer: Any, *new: Any, expected: int | np.ndarray = 0) -> None:
    """Write new columns to a layer's archive, as the layer stores them. new: k, v, pos, first, padding of
    `Storage.append`, which `expected` is of, too."""
    if layer.archive is None:
        layer.archive = _empty(layer)
    archive = layer.archive.centred_as(layer.storage)
    if archive.on_host:  # the op that packs rows writes them where they were computed
        layer.archive = archive.with_all(_near(layer, archive).append(*new), expected)
    else:
        layer.archive = archive.append(*new, expected)


def represent(layer: Any, kinds: Kinds | None, centre: Tensor, known: np.ndarray) -> None:
    """Begin a layer's archive in these kinds. None: it has begun. centre, known: of its rows, as in
    `Storage.centred_at`."""
    if kinds is None:
        layer.archive = layer.archive.centred_at(centre.to(layer.archive.device), known)
        layer.storage = layer.storage.centred_as(layer.archive)  # while all slots are there
    else:
        like = layer.storage.none(kinds)
        layer.archive = _empty(layer, like if like.centre is None else like.centred_at(centre, known))


def _near(layer: EvictionLayer, archive: Storage | Apart) -> Storage:
    """No slots, in the kinds of an archive, on the layer's device."""
    if archive.kinds == layer.storage.kinds:
        return layer.storage.blank(None)
    each = archive.each if isinstance(archive, Apart) else [archive]
    return Storage.joined([host.elsewhere(one, layer.device, False) for one in each])


def _on_host(layer: EvictionLayer) -> bool:
    """Whether the archive is to lie in another memory than the layer's slots."""
    return isinstance(layer.archive_place, str) and host.is_away(layer.storage.device)


def _files(layer: EvictionLayer) -> Files | None:
    return Files(str(layer.archive_place)) if is_folder(layer.archive_place) else None


def _empty(layer: EvictionLayer, like: Storage | None = None) -> Storage:
    """An archive without slots for such as the layer's, or as those of `like`. A prefix of the layer's slots that lies
    in the host's memory is that of the archive."""
    files, storage = _files(layer), like or layer.storage
    if not _on_host(layer):
        return storage.blank(files)
    return host.elsewhere(storage, torch.device("cpu"), True, files, storage.prefix if storage.far else None)


def append_last(layer: Any) -> None:
    """Write the slots that came since to the archive. Without one it begins with all slots."""
    storage = layer.storage
    if layer.archive is not None:
        layer.archive = _with_last(layer, _in_place(layer))
    elif _on_host(layer):
        layer.archive = _empty(layer).with_all(replace(storage, prefix=None) if storage.far else storage.gathered())
        host.wait()  # for later tokens these slots may move
    else:
        layer.storage = storage.as_prefix()
        layer.archive, files = layer.storage.forked(), _files(layer)
        if files is not None:
            layer.archive.pool = files  # it lends what later tokens need


def _in_place(layer: Any) -> Storage | Apart:
    """A layer's archive, moved if it is to lie in the other memory from here on."""
    if layer.archive.on_host == _on_host(layer):
        return layer.archive
    slots = layer.archive.gathered()
    if slots.on_host:
        return _here(layer, slots).whole()
    moved = host.elsewhere(slots, torch.device("cpu"), True).with_all(slots)
    host.wait()
    return moved


def begin(sequence: Any, layers: Sequence[Any], recall: bool | str) -> None:
    """Before tokens are read: those since the last ones, which were decoded, go to the archives of a cache's layers."""
    settle(sequence, layers)
    for layer in layers:
        layer.archive_place = recall
        if not recall:
            layer.archive = None  # this read will not add to it
        elif layer.is_initialized:
            append_last(layer)
    sequence.archived = sequence.columns


def crop(layer: Any, count: int) -> None:
    """Forget the last `count` tokens, as far as they are in the archive; forks may read it."""
    gone = max(0, layer.sequence.archived + count - layer.sequence.columns)
    if layer.archive is not None and gone:
        layer.archive = layer.archive.as_prefix().crop(gone)


def whole(layer: Any) -> Storage:
    """The slots of all tokens, for a fork: those of the archive, and those that came since."""
    return _here(layer, _with_last(layer, _forked(layer.archive)))


def every(layer: EvictionLayer) -> list[Storage | Apart]:
    """The same where they lie, for reading, one storage after the other; a layer's slots if it has no archive."""
    if layer.archive is None:
        return [layer.storage]
    count = layer.sequence.columns - layer.sequence.archived
    archive = layer.archive.centred_as(layer.storage)
    if archive.on_host:
        host.wait()  # for rows that are on their way
    return [archive, _last(layer, archive, count)] if count else [archive]


def _forked(archive: Storage | Apart) -> Storage:
    return archive.gathered().forked() if isinstance(archive, Apart) else archive.forked()


def _with_last(layer: Any, archive: Any) -> Any:
    count = layer.sequence.columns - layer.sequence.archived
    if not count:
        return archive
    archive = archive.centred_as(layer.storage)
    archive = archive.with_all(_last(layer, archive, count))
    if archive.on_host:
        host.wait()  # the layer's slots may move, and the host may read its own
    return archive


def _last(layer: EvictionLayer, archive: Storage | Apart, count: int) -> Storage:
    """The last slots of each head, in the kinds of an archive."""
    last = layer.storage.last(count)
    return last if archive.kinds == last.kinds else _near(layer, archive).with_all(last)


def _here(layer: EvictionLayer, archive: Storage) -> Storage:
    """The archive on the layer's device: a far storage, if it lies in another memory."""
    return host.elsewhere(archive, layer.device, False, layer.pool, archive) if archive.on_host else archive


def recall(layer: Any, due: np.ndarray) -> None:
    """The slots of all tokens take the place of the kept ones in the rows that are due [B], until the next cut."""
    every = layer.archive
    if every.on_host:
        host.wait()  # for this step's row: the host may move it
    if not due.all() or isinstance(every, Apart):
        rows = zip(due, apart([every]).each, apart([layer.storage]).each, strict=True)
        every = Storage.joined(
            [_alike(_here(layer, archived), kept) if recalls else kept for recalls, archived, kept in rows]
        )
    _restore(layer, every if every.on_host else every.gathered())
    layer.storage.fetch()


def _alike(archived: Storage, kept: Storage) -> Storage:
    """The slots of a row's archive as the kept ones of other rows are stored."""
    return archived if archived.kinds == kept.kinds else kept.blank(None).with_all(archived.gathered())


def _restore(layer: Any, archive: Storage | Apart) -> None:
    layer.storage, layer.head_offsets = _here(layer, _forked(archive)), None


def recall_all(layers: Sequence[Any], meter: Any, always: bool) -> None:
    """Let every layer have the archive's slots in place of its own, if all have an archive, and one has lost slots or
    always. What follows a prefix is read in one place with it once the layer attends, so that one layer at a time has a
    copy."""
    if any(layer.archive is None for layer in layers):
        return
    lost = any((layer.archive.total_counts > layer.counts).any() for layer in layers)
    if not (lost or always):
        return
    kept = [layer.positions() for layer in layers] if lost else []
    with meter.clock("recall"):
        for layer in layers:
            _restore(layer, layer.archive)
    if lost:
        meter.recalls = [(before, layer.positions()) for before, layer in zip(kept, layers, strict=True)]
