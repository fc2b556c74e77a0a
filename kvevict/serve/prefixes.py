"""What was kept of prompts' beginnings: in memory, and when that is full on disk, least recently used first out."""

import contextlib
import hashlib
import os
from collections import OrderedDict
from pathlib import Path

import numpy as np

from .. import sealed
from ..store import FORMAT, OPTIONAL, load_cache, save_cache
from .log import LOG

SUFFIX = ".safetensors"
FACTS = 1 << 16  # bytes of a file beside its tensors, at most


def key_of(owner: str, weights, policy, ids: list, text: str | None = None) -> str:
    """What a prefix is stored under: a hash of all that its cache depends on, and of whose it is; and the mark of the
    stored text in it, by which `forget` finds it."""
    facts = "\0".join((FORMAT, owner, str(weights), policy.to_json()))
    key = hashlib.sha256(facts.encode() + b"\0" + np.array(ids, np.int64).tobytes()).hexdigest()
    return key if text is None else f"{key}-{mark_of(owner, text)}"


def mark_of(owner: str, text: str) -> str:
    return hashlib.sha256(f"{owner}\0{text}".encode("utf-8", "surrogatepass")).hexdigest()[:32]


def bytes_of(cache) -> int:
    """Bytes of a cache's tensors. What it shares with others counts too."""
    storages = {}
    for layer in cache.layers:
        own = layer.storage.tensors() if hasattr(layer, "storage") else (layer.keys, layer.values)
        more = (getattr(layer, name, None) for name in OPTIONAL)
        for tensor in (*own, *more):
            if tensor is not None:
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class Prefixes:
    """Caches by key. Used by the thread that generates alone.

    folder   of the files; None: what does not fit in memory is forgotten
    memory   bytes of the caches that are kept in memory at most
    disk     bytes of the files at most: a function, as texts take up some of them
    """

    def __init__(self, model, memory: int, folder=None, disk=lambda: 0):
        self.model, self.memory, self.disk = model, memory, disk
        self.folder = None if folder is None else Path(folder)
        self._live: OrderedDict = OrderedDict()  # key -> (cache, bytes), least recently used first
        self._files: OrderedDict = OrderedDict()  # key -> bytes, likewise
        self.live_bytes = self.file_bytes = 0
        if self.folder is not None:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._index()

    def _index(self) -> None:
        found = []
        for path in self.folder.glob(f"*{SUFFIX}"):
            with contextlib.suppress(OSError):
                found.append((path.stat().st_mtime_ns, path.stem, path.stat().st_size))
        for _, key, size in sorted(found):
            self._files[key] = size
            self.file_bytes += size
        self._fit(0)

    def knows(self, key: str) -> bool:
        return key in self._live or key in self._files

    def get(self, key: str):
        """A fork of a cache; None where it is not stored, or its file is damaged."""
        if key in self._live:
            self._live.move_to_end(key)
            return self._live[key][0].fork()
        if key not in self._files:
            return None
        path = self._path(key)
        try:
            if sealed.texts(path).get("name") != key:
                raise ValueError(f"{path} is the file of another prefix")
            cache = load_cache(path, self.model)
        except (ValueError, OSError) as error:
            LOG.warning("a stored prefix is read again", extra={"facts": {"reason": str(error)}})
            self._forget(key)
            return None
        self._files.move_to_end(key)
        with contextlib.suppress(OSError):
            os.utime(path)  # so that a restart knows it
        self._hold(key, cache)
        return cache.fork()

    def put(self, key: str, cache) -> None:
        """Store a cache, which nobody changes any more."""
        self._hold(key, cache)

    def remove(self, key: str) -> None:
        """Forget one cache, where it is stored."""
        if key in self._live:
            self.live_bytes -= self._live.pop(key)[1]
        if key in self._files:
            self._forget(key)

    def forget(self, mark: str) -> None:
        """Remove the prefixes of a stored text from memory and disk."""
        for key in [key for key in (*self._live, *self._files) if key.endswith(f"-{mark}")]:
            self.remove(key)

    def flush(self, keys=None) -> None:
        """Write what memory holds of these keys, or all that it holds, to disk, to outlive the process."""
        for key in list(self._live) if keys is None else keys:
            if key in self._live:
                self._write(key, self._live[key][0])

    def _hold(self, key, cache) -> None:
        if key in self._live:
            self.live_bytes -= self._live.pop(key)[1]
        self._live[key] = cache, bytes_of(cache)
        self.live_bytes += self._live[key][1]
        while self.live_bytes > self.memory:
            oldest, (other, size) = self._live.popitem(last=False)
            self.live_bytes -= size
            self._write(oldest, other)

    def _write(self, key, cache) -> None:
        """A file of a cache, if there is a folder, it has none yet, and one fits."""
        size = bytes_of(cache) + FACTS
        if self.folder is None or key in self._files or size > self.disk():
            return
        self._fit(size)
        try:
            save_cache(cache, self._path(key), name=key)
            self._files[key] = self._path(key).stat().st_size
        except (OSError, ValueError) as error:
            LOG.warning("a prefix is not stored on disk", extra={"facts": {"reason": str(error)}})
            return
        self.file_bytes += self._files[key]
        self._fit(0)

    def _fit(self, more: int) -> None:
        """Remove the least recently used files until `more` bytes fit."""
        while self._files and self.file_bytes + more > self.disk():
            self._forget(next(iter(self._files)))

    def _forget(self, key) -> None:
        self.file_bytes -= self._files.pop(key)
        with contextlib.suppress(OSError):
            self._path(key).unlink()

    def _path(self, key):
        return self.folder / f"{key}{SUFFIX}"
