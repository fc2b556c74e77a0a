"""Stores the KV caches of prompts' prefixes, with the slots of all tokens, in memory and in files.

A prompt uses as many tokens of a cache in memory as it begins with. Servers may share the files. A file's name is a
hash of everything that its cache depends on. On a CPU loaded slots stay in the file, mapped into memory: all servers of
a machine share one copy, which does not count as a process's memory."""

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
from torch.nn import Module

from ..engine.memory.cache import EvictionCache
from ..engine.memory.mapped import in_file
from ..engine.memory.stateful import tensors_of
from ..models.families import device_of
from ..store import files, sealed
from ..store.loading import load_cache, stays
from ..store.saving import save_cache
from .beginnings import Beginnings, mark_in
from .log import Troubles
from .radix import Radix

SUFFIX = ".safetensors"
FACTS = 1 << 16  # most bytes of a file's header, which is everything but its tensors
FEW = 64  # tokens that a cache must have for itself to stay in memory beside a longer one
LEFT = 3600  # age in seconds at which an unfinished file is taken for one that a killed process left


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


@dataclass(eq=False)
class Live:
    """A cache in memory, of the first `end` tokens of a prompt."""

    prompt: Beginnings
    end: int
    cache: EvictionCache
    size: int  # bytes; 0: the slots lie in the cache's file
    used: int  # the larger, the later this cache was used

    path = property(lambda self: self.prompt.until(self.end))
    key = property(lambda self: self.prompt.keys[self.prompt.filed(self.end)])  # of the cache's file


class Prefixes:
    """The stored caches of prompts' prefixes. Only the thread that owns the model may use this object, except
    `filed`, `has_file` and `file_bytes`, which any thread may.

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
        self._live: dict[str, Live] = {}  # by `Live.key`
        self._tree: Radix[Live] = Radix()  # by `Live.path`
        self._uses = count()
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

    def known(self, *each: Beginnings) -> int:
        """Return the number of a prompt's first tokens that are in memory, all but the last token at most. each:
        `Reader.beginnings` of the prompt"""
        found = (prompt.tokens(self._tree.longest(prompt.until(prompt.most))[0]) for prompt in each)
        return max(found, default=0)

    def filed(self, prompt: Beginnings) -> int:
        """Return the number of a prompt's first tokens that are in a file."""
        return next((end for end in prompt.ends(prompt.most) if self.has_file(prompt.keys[end])), 0)

    def tell(self, prompt: Beginnings, end: int, size: int) -> None:
        """Log a warning if the slots of a stored text, a prompt's first `end` tokens with `size` bytes, fit neither in
        memory nor on disk."""
        if self.known(prompt) < end and not self.has_file(prompt.keys[end]):
            advice = "raise --memory-bytes" + ("" if self.folder is None else " or --store-bytes")
            error = ValueError(f"its slots take {size} bytes: {advice}")
            self._troubles.note("a stored text is read again for each question", error)

    def has_file(self, key: str) -> bool:
        return self.folder is not None and os.path.exists(self._path(key))

    def get(self, prompt: Beginnings, least: int = 0) -> tuple[EvictionCache | None, int]:
        """Return (copy-on-write fork of the cache of as many of a prompt's first tokens as are stored, number of these
        tokens); (None, 0) if no more than `least` are."""
        known = self.known(prompt)
        for end in prompt.ends(prompt.most):
            if end <= max(known, least):
                break
            if self.has_file(prompt.keys[end]) and (cache := self._loaded(prompt.keys[end])) is not None:
                self.put(prompt, end, cache)
                return cache.fork(), end
        if known <= least:
            return None, 0
        _, node = self._tree.longest(prompt.until(known))
        live = max(node.items(), key=lambda each: each.used)  # so that the others may become the least recently used
        live.used = next(self._uses)
        if not live.size:
            with contextlib.suppress(OSError):
                os.utime(self._path(live.key))
        return live.cache.first(known), known

    def _loaded(self, key: str) -> EvictionCache | None:
        """Load a cache from its file; None if the file is damaged, or if another server has removed it."""
        path = self._path(key)
        try:
            os.utime(path)  # marks the file as used before it is read: servers remove the least recently used file
            with files.staying(path) as stays:
                if sealed.texts(stays).get("name") != key:
                    raise ValueError(f"{path} is the file of another prefix")
                return load_cache(stays, self.model)
        except (ValueError, OSError) as error:
            if self.has_file(key):  # the file is damaged
                self._troubles.note("a stored prefix is read again", error)
                _unlink(path)
            return None

    def put(self, prompt: Beginnings, end: int, cache: EvictionCache) -> None:
        """Store the cache of a prompt's first `end` tokens in memory, in place of caches that have no more than a few
        last tokens of their own. The cache must not change afterwards. Memory drops the least recently used caches
        until the rest fits; a fork that is being read keeps its slots."""
        path = prompt.until(end)
        length, node = self._tree.longest(path)
        common = prompt.tokens(length)
        short = [each for each in node.items() if common and each.end - common < FEW]
        for each in {*self._tree.within(path), *short}:
            self._drop(each)
        self._let_go()
        self.place(cache)
        self._add(Live(prompt, end, cache, 0 if in_files(cache) else bytes_of(cache), next(self._uses)))
        while self.live_bytes > self.memory:
            self._drop(min((each for each in self._live.values() if each.size), key=lambda each: each.used))

    def _add(self, live: Live) -> None:
        if live.key in self._live:  # of another prompt, which differs in its last tokens
            self._drop(self._live[live.key])
        self._live[live.key] = live
        self._tree.add(live.path, live)
        self.live_bytes += live.size

    def _drop(self, live: Live) -> None:
        """Remove a cache from memory."""
        del self._live[live.key]
        self._tree.remove(live.path)
        self.live_bytes -= live.size

    def forget(self, marks: Collection[str]) -> None:
        """Remove the caches of some stored texts from memory and from disk. marks: `mark_of` each text."""
        for live in [live for key, live in self._live.items() if mark_in(key) in marks]:
            self._drop(live)
        for path in self._there(f"*-*{SUFFIX}") if marks else ():
            if mark_in(path.stem) in marks:
                _unlink(path)

    def flush(self) -> int:
        """Write all caches in memory to disk, and return the number of files written."""
        each = list(self._live.values())
        return sum(self.write(live.prompt, live.end, live.cache) for live in each if live.key in self._live)

    def _let_go(self) -> None:
        """Remove from memory the caches whose slots lie in removed files: such a file takes up the disk until it is no
        longer mapped."""
        for live in [live for key, live in self._live.items() if not live.size and not self.has_file(key)]:
            self._drop(live)

    def write(self, prompt: Beginnings, end: int, cache: EvictionCache) -> bool:
        """Write the cache of a prompt's first `end` tokens, or of as many of them as a file may have, unless the file
        exists or does not fit, or the cache's stored text was deleted. Returns whether it was written. If slots can
        stay in a file, the cache in memory then uses the file's slots. cache: of `end` tokens or more"""
        end = prompt.filed(end)
        key, size = prompt.keys[end], bytes_of(cache) + FACTS
        if self.folder is None or self.has_file(key) or self._is_gone(key) or size > (most := self.disk()):
            return False
        self._fit(most - size)
        try:
            save_cache(cache if cache.get_seq_length() == end else cache.first(end), self._path(key), name=key)
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
            self._leave(self._live[key], end)
        return True

    def _leave(self, live: Live, end: int) -> None:
        """Replace a cache in memory by one whose slots, of the first `end` tokens, stay in its file."""
        if device_of(self.model).type != "cpu":  # a GPU needs the slots in its own memory
            return
        with contextlib.suppress(ValueError, OSError):  # another server may have removed the file
            cache = load_cache(self._path(live.key), self.model, verify=False)
            self.place(cache)
            if in_files(cache):
                self._add(replace(live, end=end, cache=cache, size=0))

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
