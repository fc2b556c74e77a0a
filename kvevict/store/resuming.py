"""Reads a text into a cache file. If the process is killed, the next one continues (docs/usage.md, "Recall").

While the text is read, the slots of each chunk are written to a file of their own, a part, in a folder beside the cache
file. A part has the format of `save_cache`, but only the slots of tokens start .. stop-1; a part with start = 0 can be
loaded as a cache. A part exists completely or not at all, also after kill -9. After a loss of power its checksum shows
damage.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ..context import context, within
from ..engine.memory import ranks
from ..engine.memory.cache import EvictionCache
from ..engine.watch.watcher import Watcher
from ..models import families
from ..models.weights import Identity, identity
from ..patch import slot_bytes
from ..policy.checks import parsed
from ..policy.kv import POSITION
from ..policy.policy import Policy
from ..policy.run import Run
from . import sealed
from .form import ANY, FLAT, FORMAT, policy_of
from .loading import load_cache
from .saving import write

PART = FORMAT.replace("cache", "part")  # format of parts that do not start at token 0, and so are not caches
WRITTEN = {families.FULL_ATTENTION, families.SLIDING, families.NOTHING}  # kinds of layers that a cache file can hold


class TextPart(NamedTuple):
    """A loaded part, or the loaded cache file: the slots of the text's tokens start .. stop-1."""

    path: str
    start: int
    stop: int
    tensors: dict[str, Tensor]
    texts: dict[str, str]  # the file's metadata


class Reading(Watcher):
    """Reads a text, given by its token ids, into the cache file `path`. Raises ValueError for a policy, model or path
    with which that is impossible."""

    def __init__(self, path: str | os.PathLike, model: Any, policy: Policy, run: Run, ids: list[int]) -> None:
        self.path = os.path.realpath(os.fsdecode(path))
        self.folder = f"{self.path}.parts"
        self.model, self.ids = model, np.array(ids, np.int64)
        self.done, self.writes = 0, True  # `done`: tokens that the parts hold; `writes`: whether to write further parts
        decoder = families.find_decoder(model)
        if not policy.recall:
            raise ValueError(
                "file= needs a policy that recalls: add recall=True, or read without file= and call kvevict.save_cache"
            )
        if not WRITTEN.issuperset(families.layer_kinds(decoder.config)):
            raise ValueError("file= cannot hold this model's layers with a state: read without it")
        if ranks.of(families.base_model(model)).size > 1:
            raise ValueError(
                "file= needs a single process: in tensor parallel read without it, and call kvevict.save_cache"
            )
        if getattr(getattr(families.unwrapped(model), "active_peft_config", None), "num_virtual_tokens", None):
            raise ValueError("file= names a text's tokens alone, not those that PEFT puts before it: read without it")
        if os.path.exists(self.path) and not os.path.isfile(self.path):
            raise ValueError(f"file={self.path!r} is not a regular file; give another path")
        if not os.path.isdir(os.path.dirname(self.path)):
            raise FileNotFoundError(errno.ENOENT, "its folder is missing: make it, or give another file=", self.path)
        self.identity, self.slot_bytes = identity(decoder), slot_bytes(model, run.archive_kv or run.kv, POSITION)
        self.comparable = _comparable(policy, run)

    def cache(self, forward: Callable[[EvictionCache | None, int], EvictionCache]) -> EvictionCache:
        """Return the text's cache, loaded from the file or the parts if they have all tokens. Otherwise call
        forward(cache of the tokens in the parts or None, number of those tokens), which reads the other tokens; `chunk`
        is called after each chunk."""
        done = self._part(self.path)
        if done is not None and done.stop == len(self.ids):
            return self._loaded(self.path)
        with _locked(self.folder, self.path):
            before = self._before()
            if before is not None and self.done == len(self.ids):
                self._end(before)
                return self._loaded(self.path)
            self._check_room()
            with within(watchers=(*context().watchers, self)):
                cache = forward(None if before is None else self._loaded(before), self.done)
            self._finish(cache)
            return cache

    def chunk(self, cache: EvictionCache) -> None:
        """Write the slots of the chunk that was read last to a part of their own."""
        stop, every = cache.sequence.columns, cache.tiers.every
        if self.writes:
            part = cache.with_storages({index: slots.last(stop - self.done) for index, slots in every.items()})
            for index, slots in every.items():
                if part.layers[index].budget is None:  # the budget is only decided at the prompt's end
                    part.layers[index].budget = slots.total_counts.sum(1)
            try:
                self._write(part, self.done, stop, sync=False)
                self.done = stop
            except OSError as error:
                self.writes = False
                warnings.warn(
                    f"{self.folder} holds the text up to token {self.done} ({error.strerror}): it is read on without "
                    "parts, and a process that is killed loses the rest. Make room before the reading ends",
                    stacklevel=2,
                )

    def _finish(self, cache: EvictionCache) -> None:
        """Write the complete cache to the file, and remove the parts; warn if the file cannot be written."""
        try:
            self._write(cache, 0, len(self.ids))
            self._end(self._name(0))
        except OSError as error:
            warnings.warn(
                f"{self.path} was not written ({error.strerror}): the cache is in memory alone. Write it elsewhere "
                "with kvevict.save_cache, or make room and read again: that goes on after the parts",
                stacklevel=2,
            )

    def _end(self, part: str) -> None:
        """Rename `part`, which has all tokens, to the cache file's name, and remove all other parts."""
        self._keep(part)
        if part != self.path:
            os.replace(part, self.path)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _write(self, cache: EvictionCache, start: int, stop: int, sync: bool = True) -> None:
        write(cache, self._name(start), self._texts(start, stop), sync)

    def _before(self) -> str | None:
        """Join the parts that follow one another, from the text's first token on, to one part, and remove all others.
        Sets `done`, and returns the joined part's path; None if no part has the first token."""
        at = sorted(int(name) for name in os.listdir(self.folder) if name.isdecimal())
        found = {part.start: part for start in at if (part := self._part(self._name(start))) is not None}
        file = self._part(self.path)
        if file is not None and (0 not in found or file.stop >= found[0].stop):
            found[0] = file
        chain: list[TextPart] = []
        while self.done in found:
            chain.append(found[self.done])
            self.done = chain[-1].stop
        if any(start >= self.done for start in at):
            warnings.warn(
                f"{self._name(self.done)} is damaged or missing: the text is read anew from token {self.done}",
                stacklevel=2,
            )
        if len(chain) > 1:
            texts = chain[-1].texts | self._texts(0, self.done)
            sealed.write(self._name(0), _joined([part.tensors for part in chain]), texts)
        before = self._name(0) if len(chain) > 1 else chain[0].path if chain else None
        self._keep(before)
        return before

    def _keep(self, part: str | None) -> None:
        """Remove all parts except the file `part` (None: all), and the unfinished files of killed processes."""
        for name in os.listdir(self.folder):
            path = os.path.join(self.folder, name)
            if path != part and name.isdecimal():
                os.unlink(path)
            elif name.startswith(".kvevict-"):
                shutil.rmtree(path, ignore_errors=True)

    def _part(self, path: str) -> TextPart | None:
        """Load the part, or the cache file, at `path`. Returns None if there is nothing at `path`, or a damaged part.
        Raises ValueError for a damaged cache file, and for a file of another text, model or policy."""
        if not os.path.exists(path):
            return None
        advice = f"delete {self.path if path == self.path else self.folder}, or give another file="
        try:
            texts = sealed.texts(path)
        except ValueError:
            texts = {}
        if path == self.path and not texts.get("format", "").startswith(ANY):
            raise ValueError(f"{path} is not a cache: file= is the file that kvevict.read writes; give another file=")
        try:
            tensors = sealed.tensors(path)
        except ValueError as error:
            if path != self.path:
                return None
            raise ValueError(f"{path} is damaged: {error}; {advice}") from None
        if "text" not in texts:
            raise ValueError(f"{path} does not name its text, as a file of kvevict.read(file=) does; {advice}")
        text, common = parsed(texts["text"]), parsed(texts["cache"])
        if texts["format"] != (PART if text["start"] else FORMAT):
            raise ValueError(f"{path} was written by another version of kvevict; {advice}")
        if text != self._text(text["start"], text["stop"]):
            raise ValueError(f"{path} is of another text; {advice}")
        differs = Identity(common["weights"], common["configuration"] or {}).difference(self.identity)
        if differs:
            raise ValueError(f"{path} was written for another model: {differs}; {advice}")
        theirs = _comparable(*policy_of(common))
        others = [name for name, value in self.comparable.items() if theirs[name] != value]
        if others:
            raise ValueError(f"{path} was read with another {', '.join(others)}; give that, {advice}")
        return TextPart(path, text["start"], text["stop"], tensors, texts)

    def _text(self, start: int, stop: int) -> dict[str, Any]:
        """Return what identifies the text of a stored part: the positions of the part's first token and of its end
        (exclusive), and a hash of all token ids before that end."""
        return dict(start=start, stop=stop, ids=hashlib.sha256(self.ids[:stop].tobytes()).hexdigest())

    def _texts(self, start: int, stop: int) -> dict[str, str]:
        return dict(format=PART if start else FORMAT, text=json.dumps(self._text(start, stop)))

    def _name(self, start: int) -> str:
        return os.path.join(self.folder, f"{start:09d}")

    def _loaded(self, path: str) -> EvictionCache:
        return load_cache(path, self.model, verify=False)  # `_part` has verified it

    def _check_room(self) -> None:
        """Raise OSError unless the disk has room for all parts and, beside them, the cache file."""
        needed = self.slot_bytes * (2 * len(self.ids) - self.done)
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            what = f"the parts and the file take {needed} bytes more, and {free} are free; make room"
            raise OSError(errno.ENOSPC, what, self.path)


def _comparable(policy: Policy, run: Run) -> dict[str, Any]:
    """Return the options of a policy and its run that decide which slots are stored, and how they are stored."""
    return parsed(policy.to_json()) | dict(kv=run.kv, recall_kv=run.archive_kv)


def _joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor | sealed.Pieces]:
    """Join the tensors of parts that follow one another: each head gets its slots of every part, in order. Tensors of
    other kinds (sliding windows, or equal in all parts) come from the last part."""
    whole: dict[str, Tensor | sealed.Pieces] = dict(parts[-1])
    for layer in [name.removesuffix("len") for name in parts[-1] if name.endswith(".len")]:
        lengths = [part[f"{layer}len"] for part in parts]
        whole[f"{layer}len"] = counts = sum(lengths[1:], lengths[0])
        for kind in FLAT:
            each = [part[layer + kind].split(n.flatten().tolist()) for part, n in zip(parts, lengths, strict=True)]
            rows = [heads[head] for head in range(counts.numel()) for heads in each]
            shape = int(counts.sum()), *rows[0].shape[1:]
            whole[layer + kind] = sealed.Pieces(shape, rows[0].dtype, lambda rows=rows: rows)
    return whole


@contextlib.contextmanager
def _locked(folder: str, path: str) -> Iterator[None]:
    """Make a folder, and lock it against other processes within the block. If the process is killed, the lock ends."""
    name = os.path.join(folder, "lock")
    while True:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        try:
            file = open(name, "w")  # noqa: SIM115
        except FileNotFoundError:  # another process has removed the folder
            continue
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BlockingIOError(
                    errno.EAGAIN, "another process is reading a text into it: wait, or give another file=", path
                ) from None
            if os.path.exists(name) and os.path.samestat(os.stat(name), os.fstat(file.fileno())):
                yield
                return
