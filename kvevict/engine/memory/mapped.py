"""Buffers in memory-mapped files, for the archives of a run with `recall="FOLDER"` and for loaded caches."""

from __future__ import annotations

import os
import tempfile
import warnings
from itertools import accumulate
from typing import NamedTuple

import torch

from .stored import Stored

ALIGNED = 64  # bytes; each buffer in a file starts at a multiple of this


class Lent(NamedTuple):
    """Buffer rows that lie in a file and are lent to one storage, as a `Region` is lent by a pool."""

    buffers: tuple[torch.Tensor, ...]
    rows: int
    where: str  # the file, or the folder of a file whose name is removed
    start: int = 0


def in_file(storage: Stored) -> bool:
    """Whether the slots of a storage are in a file: the slots after its prefix, or, if there are none, the slots of the
    prefix."""
    if storage.prefix is not None and not storage.counts.any():
        return in_file(storage.prefix)
    return any(isinstance(region, Lent) for region in storage.regions)


def places(storage: Stored) -> list[str]:
    """Return where the slots of a storage lie, those of its prefix first: files, folders and devices, each once."""
    before = [] if storage.prefix is None else places(storage.prefix)
    files = [region.where for region in storage.regions if isinstance(region, Lent)]
    own = (files or [str(storage.device)]) if storage.counts.any() or not before else []
    return list(dict.fromkeys([*before, *own]))


def is_folder(archive: bool | str) -> bool:
    """Whether a value of `Run.archive` is the path of a folder, in which archives are to be files."""
    return isinstance(archive, str) and archive != "memory"


class Files:
    """Lends buffers that lie in files of a folder. A file's name is removed once the file is mapped: no other process
    can open it, and its disk space is free again when the last cache that reads it is dropped or the process ends."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple:
        return type(None), ()  # a copied or pickled cache has its slots in memory

    def lend(self, rows: int, like: Stored) -> Lent | None:
        """Lend buffers of `rows` rows for slots like those of `like`. Returns None for 0 rows, and, with a warning, if
        the folder has no room for the file."""
        if not rows:
            return None
        sizes = [rows * t[:0].new_empty(1, *t.shape[1:]).nbytes for t in like.buffers]
        starts = [0, *accumulate(-(-size // ALIGNED) * ALIGNED for size in sizes)]
        try:
            file = _mapped(self.folder, starts[-1])
        except OSError as error:
            warnings.warn(
                f"recall: {self.folder} cannot hold a file of {starts[-1]} bytes ({error.strerror}): this layer's "
                "archive lies in memory from here on. Give a folder with room for it, or read shorter texts",
                stacklevel=2,
            )
            return None
        flat = [file[start : start + size] for start, size in zip(starts, sizes)]
        with torch.inference_mode(False):  # so that a cache filled in inference mode can be written to outside of it
            buffers = [x.view(t.dtype).view(rows, *t.shape[1:]) for x, t in zip(flat, like.buffers, strict=True)]
        return Lent(tuple(buffers), rows, self.folder)


def _mapped(folder: str, size: int) -> torch.Tensor:
    """Create a file in a folder, map it into memory as uint8 [size], and remove its name. Raises OSError if the disk is
    full."""
    number, path = tempfile.mkstemp(dir=folder, prefix="kvevict-")  # a file of mode 0600
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(number, 0, size)  # a write to a hole on a full disk would raise SIGBUS
        else:
            os.truncate(number, size)
        with torch.inference_mode(False):
            storage = torch.UntypedStorage.from_file(path, shared=True, nbytes=size)
            return torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[arg-type]  # its stub lacks a base class
    finally:
        os.close(number)
        os.unlink(path)


def check(archive: bool | str) -> None:
    """Raise ValueError if `archive`, a value of `Run.archive`, is a folder in which no file can be created."""
    if not is_folder(archive):
        return
    try:
        _mapped(str(archive), ALIGNED)
    except (OSError, RuntimeError) as error:
        raise ValueError(
            f"recall={archive!r}: no file can be made there ({error}); give a folder that can be written to, 'memory' "
            "for an archive in the host's memory, or True for one in the memory of the model's device"
        ) from None
