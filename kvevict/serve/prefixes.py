"""Stores the KV caches of prompts' prefixes, with the slots of all tokens, in memory and in files.

Servers may share the files. A file's name is a hash of everything that its cache depends on. On a CPU loaded slots stay
in the file, mapped into memory: all servers of a machine share one copy, which does not count as a process's memory."""

import contextlib
import hashlib
import os
import shutil
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from torch.nn import Module

from ..engine.memory.cache import EvictionCache
from ..engine.memory.mapped import in_file
from ..engine.memory.stateful import tensors_of
from ..models.families import device_of
from ..policy.policy import Policy
from ..policy.run import Run
from ..store import files, sealed
from ..store.form import FORMAT
from ..store.loading import load_cache, stays
from ..store.saving import save_cache
from .log import Troubles

SUFFIX = ".safetensors"
FACTS = 1 << 16  # most bytes of a file's header, which is everything but its tensors
LEFT = 3600  # age in seconds at which an unfinished file is taken for one that a killed process left


def keys_of(
    owner: str, weights: str, policy: Policy, run: Run, ids: list[int], ends: Iterable[int], text: str | None,
    start: int,
) -> dict[int, str]:  # fmt: skip
    """Return {end: key} of a prompt's prefixes, by their numbers of tokens `ends`, which ascend. A key is a hash of the
    owner and of everything that a cache depends on. A prefix that ends after token `start` contains tokens of the
    stored text `text`: its key ends with the text's mark (`mark_of`), by which `forget` finds it."""
    facts = "\0".join((FORMAT, owner, weights, policy.to_json(), run.kv, run.archive_kv or run.kv)) + "\0"
    digest, before, found = hashlib.sha256(facts.encode()), 0, {}
    for end in ends:
        digest.update(np.array(ids[before:end], np.int64).tobytes())
        found[end] = digest.hexdigest() + ("" if text is None or end <= start else f"-{mark_of(owner, text)}")
        before = end
    return found


def mark_of(owner: str, text: str) -> str:
    return hashlib.sha256(f"{owner}\0{text}".encode("utf-8", "surrogatepass")).hexdigest()[:32]


def mark_in(key: str) -> str:
    """Return the mark at the end of a key, which identifies a stored text; "" if the key has none."""
    return key.partition("-")[2]


def unmarked(keys: dict[int, str]) -> dict[int, str]:
    """Return {end: key} without marks: the keys that the same prefixes have in prompts that contain the stored text
    instead of naming it."""
    return {end: key.partition("-")[0] for end, key in keys.items()}


def bytes_of(cache: EvictionCache) -> int:
    """Count the bytes of a cache's tensors, memory that it shares with other caches included. Of a buffer that belongs
    to a pool of slots, only the rows of this cache count."""
    storages, lent = {}, 0
    pools = [layer.pool for layer in cache.tiers.layers.values() if layer.pool is not None]
    buffers = {buffer.data_ptr() for pool in pools for buffer in pool.buffers}
    for tensor in chain(cache.tiers.tensors(), *map(tensors_of, cache.layers)):
        storage = tensor.untyped_storage()
        if storage.data_ptr() in buffers:
            lent += tensor.nbytes
        else:
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values()) + lent


def in_files(cache: EvictionCache) -> bool:
    """Return whether a cache's slots lie in a file."""
    return all(in_file(layer.storage.gathered()) for layer in cache.tiers.layers.values())


def shares_of(cache: EvictionCache, start: int, stop: int) -> np.ndarray:
    """Return the share of all layers' kv heads that keep each of the positions start .. stop-1, for one batch row."""
    counts, heads = np.zeros(cache.get_seq_length()), 0
    for index in cache.tiers.layers:
        for positions in cache.tiers.kept(index).positions()[0]:
            counts[positions.cpu().numpy()] += 1
            heads += 1
    return counts[start:stop] / max(heads, 1)


class Prefixes:
    """The stored caches of prefixes, by their keys. Only the thread that owns the model may use this object, except
    `knows`, `longest`, `has_file` and `file_bytes`, which any thread may.

    folder  folder of the files; None: caches are stored in memory alone
    memory  most bytes of the caches in memory; caches whose slots lie in files do not count
    disk    returns the most bytes that all files may have, which changes with the stored texts on the same disk
    gone    `Texts.gone`, which returns the marks of deleted texts, whose caches are not written
    """

    def __init__(
        self, model: Module, memory: int, folder: Path | None, disk: Callable[[], int], gone: Callable[..., set[str]]
    ) -> None:
        self.model, self.memory, self.disk, self.gone = model, memory, disk, gone
        self.folder: Any = folder
        self.place: Callable[[EvictionCache], None] = lambda cache: None  # called before a cache is stored in memory
        # key -> (cache, its bytes, keys of its shorter prefixes), least recently used first; 0 bytes: slots in a file
        self._live: OrderedDict[str, tuple[EvictionCache, int, list[str]]] = OrderedDict()
        self._inside: dict[str, str] = {}  # key of a shorter prefix -> key of the cache that contains it
        self.live_bytes, self._tidied, self._troubles = 0, 0.0, Troubles()
        if self.folder is not None:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fit(self.disk())
            self._tidy()
            before = (time.time() - LEFT) * 1e9
            old = {mark_in(path.stem) for used, _, path in self._files() if used < before} - {""}
            self.forget(self.gone(*old))  # caches left by a killed process that had deleted their texts

    @property
    def file_bytes(self) -> int:
        return sum(size for _, size, _ in self._files())

    def knows(self, key: str) -> bool:
        """Return whether a prefix is in memory, by itself or within the cache of a longer prefix."""
        return key in self._live or key in self._inside

    def longest(self, keys: dict[int, str]) -> int:
        """Return the number of tokens of a prompt's longest prefix in memory; keys: {end: key}, ends ascending."""
        return next((end for end in reversed(keys) if self.knows(keys[end])), 0)

    def tell(self, key: str, size: int) -> None:
        """Log a warning if the slots of a stored text, `size` bytes, fit neither in memory nor on disk."""
        if not self.knows(key) and not self.has_file(key):
            advice = "raise --memory-bytes" + ("" if self.folder is None else " or --store-bytes")
            error = ValueError(f"its slots take {size} bytes: {advice}")
            self._troubles.note("a stored text is read again for each question", error)

    def has_file(self, key: str) -> bool:
        return self.folder is not None and os.path.exists(self._path(key))

    def get(self, keys: dict[int, str], end: int) -> EvictionCache | None:
        """Return a copy-on-write fork of the cache of a prompt's first `end` tokens; None if no cache is stored or its
        file is damaged. keys: {end: key} of the prompt's prefixes."""
        key = keys[end]
        source = key if key in self._live else self._inside.get(key)
        if source is not None:
            self._live.move_to_end(source)
            if not self._live[source][1]:
                with contextlib.suppress(OSError):
                    os.utime(self._path(source))
            return self._live[source][0].first(end)
        if not self.has_file(key):
            return None
        path = self._path(key)
        try:
            os.utime(path)  # marks the file as used before it is read: servers remove the least recently used file
            with files.staying(path) as stays:
                if sealed.texts(stays).get("name") != key:
                    raise ValueError(f"{path} is the file of another prefix")
                cache = load_cache(stays, self.model)
        except (ValueError, OSError) as error:
            if self.has_file(key):  # the file is damaged; otherwise another server has removed it
                self._troubles.note("a stored prefix is read again", error)
                _unlink(path)
            return None
        self.put(keys, end, cache)
        return cache.fork()

    def put(self, keys: dict[int, str], end: int, cache: EvictionCache) -> None:
        """Store the cache of a prompt's first `end` tokens in memory, in place of the caches of its shorter prefixes.
        The cache must not change afterwards. Memory drops the least recently used caches until the rest fits."""
        key, inner = keys[end], [each for at, each in keys.items() if at < end]
        for each in (key, *inner):
            self._drop(each)
        self._let_go()
        self.place(cache)
        self._live[key] = cache, 0 if in_files(cache) else bytes_of(cache), inner
        self._inside.update(dict.fromkeys(inner, key))
        self.live_bytes += self._live[key][1]
        while self.live_bytes > self.memory:
            self._drop(next(key for key, (_, size, _) in self._live.items() if size))

    def remove(self, key: str) -> None:
        """Remove a cache from memory and from disk."""
        self._drop(key)
        if self.folder is not None:
            _unlink(self._path(key))

    def forget(self, marks: Collection[str]) -> None:
        """Remove the caches of some stored texts from memory and from disk. marks: `mark_of` each text."""
        for key in [key for key in self._live if mark_in(key) in marks]:
            self.remove(key)
        for path in self._there(f"*-*{SUFFIX}") if marks else ():
            if mark_in(path.stem) in marks:
                _unlink(path)

    def flush(self) -> int:
        """Write all caches in memory to disk, and return the number of files written."""
        return sum(self.write(key, self._live[key][0]) for key in list(self._live) if key in self._live)

    def _drop(self, key: str) -> None:
        """Remove a cache from memory, if it is there."""
        _, size, inner = self._live.pop(key, (None, 0, ()))
        self.live_bytes -= size
        for each in inner:
            if self._inside.get(each) == key:
                del self._inside[each]

    def _let_go(self) -> None:
        """Remove from memory the caches whose slots lie in removed files: such a file takes up the disk until it is no
        longer mapped."""
        for key in [key for key, (_, size, _) in self._live.items() if not size and not self.has_file(key)]:
            self._drop(key)

    def write(self, key: str, cache: EvictionCache) -> bool:
        """Write a cache to its file, unless the file exists or does not fit, or the cache's stored text was deleted.
        Returns whether it was written. If slots can stay in a file, the cache in memory then uses the file's slots."""
        size = bytes_of(cache) + FACTS
        if self.folder is None or self.has_file(key) or self._is_gone(key) or size > (most := self.disk()):
            return False
        self._fit(most - size)
        try:
            save_cache(cache, self._path(key), name=key)
        except (OSError, ValueError) as error:
            self._troubles.note("a prefix is not stored on disk", error)
            return False
        self._fit(self.disk())  # texts stored meanwhile leave fewer bytes
        if time.monotonic() - self._tidied >= LEFT:
            self._tidy()
        if self._is_gone(key):  # the text was deleted while its cache was written
            _unlink(self._path(key))
            return False
        if key in self._live and stays(self.folder, cache.sequence.policy):
            self._leave(key)
        return True

    def _leave(self, key: str) -> None:
        """Replace a cache in memory by one whose slots stay in its file."""
        if device_of(self.model).type != "cpu":  # a GPU needs the slots in its own memory
            return
        with contextlib.suppress(ValueError, OSError):  # another server may have removed the file
            cache, (_, size, inner) = load_cache(self._path(key), self.model, verify=False), self._live[key]
            self.place(cache)
            if in_files(cache):
                self._live[key] = cache, 0, inner
                self.live_bytes -= size

    def _is_gone(self, key: str) -> bool:
        """Return whether the stored text of a key was deleted, and remove the caches of all deleted texts."""
        gone = self.gone()
        self.forget(gone)
        return mark_in(key) in gone

    def _files(self) -> list[tuple[int, int, Path]]:
        """Return a list with (time of the last use in ns, bytes, path) of each cache file."""
        found = []
        for path in self._there(f"*{SUFFIX}"):
            with contextlib.suppress(OSError):
                stat = path.stat()
                found.append((stat.st_mtime_ns, stat.st_size, path))
        return found

    def _there(self, pattern: str) -> list[Path]:
        """List the files that match a glob pattern; [] if the folder cannot be read, which the next write will log."""
        try:
            return [] if self.folder is None else list(self.folder.glob(pattern))
        except OSError:
            return []

    def _fit(self, most: int) -> None:
        """Remove the least recently used files until the rest have at most `most` bytes."""
        found = sorted(self._files(), reverse=True)
        used = sum(size for _, size, _ in found)
        while found and used > most:
            _, size, path = found.pop()
            used -= size
            _unlink(path)
        self._let_go()

    def _tidy(self) -> None:
        """Remove the unfinished files that killed processes have left."""
        self._tidied = time.monotonic()
        for left in (*self._there(".kvevict-*"), *self._there("../texts/*/.kvevict-*")):
            with contextlib.suppress(OSError):
                if max(each.stat().st_mtime for each in (left, *left.iterdir())) < time.time() - LEFT:
                    shutil.rmtree(left, ignore_errors=True)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{SUFFIX}"


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
