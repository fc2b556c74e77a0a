"""Stores texts that requests refer to by name. If a text's KV cache is lost, the model reads the text again."""

import contextlib
import hashlib
import json
import logging
import os
import threading
import time
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from ..store import files
from . import log
from .beginnings import mark_of
from .errors import Json, Refused
from .log import Troubles

FORMAT = "kvevict-text-1"
LETTERS, BYTES = 100, 240  # most characters of a text's name, and most bytes, because a file has this name
SETTLED = 2  # seconds within which two changes of a folder may leave the same mtime, as file systems round it
EVERY = 60  # seconds until a folder is read again though its mtime is unchanged: some file systems do not update it
JOINERS = "\u200c\u200d"  # zero-width joiners: not printable, but a part of words in many scripts


def checked(name: object) -> str:
    """Return a text's name in Unicode's form NFC. Raises Refused unless a file can have this name."""
    found = unicodedata.normalize("NFC", name) if isinstance(name, str) else ""
    fits = 0 < len(found) <= LETTERS and len(found.encode("utf-8", "replace")) <= BYTES
    fits = fits and all(each.isprintable() or each in JOINERS for each in found)
    if not (fits and found == found.strip() and found[0] != "." and not set("/\\") & set(found)):
        raise Refused(
            400, f"name must be 1 to {LETTERS} letters, {BYTES} bytes at most, without slashes and a dot or a space in "
            "front", param="name",
        )  # fmt: skip
    return found


class Text(NamedTuple):
    """A stored text, with the options for reading it."""

    text: str
    asked: Json  # the `policy` and `budget` that the text was stored with; a missing option is the server's


class _Known(NamedTuple):
    """What this server remembers of a stored text."""

    size: int  # bytes of the text in UTF-8
    mark: str | None  # `mark_of` the text, with which the keys of its caches end; None: the text's file is damaged
    file: tuple = ()  # `_file` of the text's file when it was last read, to notice a change
    whole: Text | None = None  # the text itself, if texts are stored in memory


class Texts:
    """Stored texts by owner and name, in a folder or, without one, in memory: together at most `most` bytes. Servers
    may share the folder: a text is read from its file at each use, so that every server sees what another one has
    stored or deleted."""

    def __init__(self, most: int, folder: Path | None = None) -> None:
        self.most = most
        self.folder: Any = folder
        self._known: dict[tuple[str, str], _Known] = {}  # (owner, name) -> what is known of the text
        self._looked: dict[str, tuple[float, float]] = {}  # owner -> (mtime of the owner's folder, time of its reading)
        self._marks: set[str | None] = set()  # marks of all texts known at the last call of `gone` or after it
        self._lock = threading.RLock()  # held while `_known`, `_looked` or `_marks` is used
        self._troubles = Troubles()
        if self.folder is not None:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._look_at_all(EVERY)

    @property
    def bytes(self) -> int:
        with self._lock:
            self._refresh()
            return sum(each.size for each in self._known.values())

    def check(self, owner: str, name: str, text: str, replace: bool) -> None:
        """Raise Refused if a text does not fit in `most` bytes, or if `replace` is false and another text has the
        name."""
        with self._lock:
            there = None if replace else self._text(owner, name)
            used, before = self.bytes, self._known.get((owner, name))
        if there is not None and there.text != text:
            raise Refused(409, f"there is a text {name!r} already: give another name", "text_exists", "name")
        size = used - (before.size if before else 0) + _size(text)
        if size > self.most:
            raise Refused(507, f"the texts would take {size} bytes, and the server stores {self.most}: delete some")

    def put(self, owner: str, name: str, text: str, replace: bool = True, asked: Json | None = None) -> str | None:
        """Store a text, and return the mark of the text that had the name before (None: there was none). asked: the
        `policy` and `budget` for reading the text. Raises Refused as `check` does, and if the text cannot be
        written."""
        whole = Text(text, asked or {})
        with self._lock:
            self.check(owner, name, text, replace)
            before = self._known.get((owner, name))
            if self.folder is None:
                self._note(owner, name, _Known(_size(text), mark_of(owner, text), whole=whole))
                return before and before.mark
            replace = (
                replace or before is not None
            )  # `check` has passed: a text of this name is the same, or its file is damaged
            path, data = self._path(owner, name), json.dumps(_content(owner, name, *whole))
            try:
                path.parent.mkdir(mode=0o700, exist_ok=True)
                files.write(path, data, mode=0o600, replace=replace)
            except FileExistsError:  # another server has just stored a text of this name
                self.check(owner, name, text, replace)
            except OSError as error:
                raise Refused(507, f"the text cannot be stored: {error.strerror}") from None
            self._load(owner, name, path)
            return before and before.mark

    def get(self, owner: str, name: str) -> Text:
        """Return a stored text. Raises Refused if the owner has no text of this name."""
        found = self._text(owner, checked(name))
        if found is None:
            raise Refused(404, f"text {name!r} does not exist: store it with POST /v1/kvevict/texts", "text_not_found")
        return found

    def remove(self, owner: str, name: str) -> str:
        """Delete a text, and return its mark (`mark_of`). Raises Refused if the owner has no text of this name."""
        name = checked(name)
        with self._lock:
            mark = mark_of(owner, self.get(owner, name).text)
            if self.folder is not None:
                try:
                    self._path(owner, name).unlink(missing_ok=True)
                except OSError as error:
                    raise Refused(507, f"the text cannot be deleted: {error.strerror}") from None
            self._known.pop((owner, name), None)
            return mark

    def gone(self, *marks: str | None) -> set[str]:
        """Return the marks of texts that any server has deleted since the last call of this method, and the given
        `marks` that belong to no stored text."""
        with self._lock:
            self._refresh()
            known = {each.mark for each in self._known.values()}
            found, self._marks = (self._marks | set(marks)) - known, known
            return {mark for mark in found if mark is not None}

    def of(self, owner: str) -> list[tuple[str, int]]:
        """Return a sorted list with (name, bytes) of each text of an owner."""
        with self._lock:
            self._refresh(every=0)
            return sorted(
                (name, each.size) for (whose, name), each in self._known.items() if whose == owner and each.mark
            )

    def _text(self, owner: str, name: str) -> Text | None:
        with self._lock:
            if self.folder is not None:
                return self._load(owner, name, self._path(owner, name))
            known = self._known.get((owner, name))
            return known and known.whole

    def _refresh(self, every: float = EVERY) -> None:
        """Read the owners' folders that have changed or were last read `every` seconds ago. After an error nothing that
        is known of their texts is forgotten."""
        if self.folder is not None:
            try:
                self._look_at_all(every)
            except OSError as error:
                self._troubles.note("the folder of texts cannot be read", error)

    def _look_at_all(self, every: float) -> None:
        folders = {each.name: each for each in os.scandir(self.folder) if each.is_dir()}
        for owner in folders.keys() | self._looked:
            now, folder = time.time(), folders.get(owner)
            changed = 0.0 if folder is None else folder.stat().st_mtime
            before, then = self._looked.get(owner, (None, 0.0))
            if changed != before or then < changed + SETTLED or not then <= now < then + every:
                self._look(owner, () if folder is None else os.scandir(folder))
                self._looked[owner] = changed, now

    def _look(self, owner: str, entries: Iterable[os.DirEntry]) -> None:
        """Load new and changed files in an owner's folder, and forget texts whose files are gone."""
        there = set()
        for entry in entries:  # a thousand entries take milliseconds, a thousand `Path`s ten times as long
            name, kind = os.path.splitext(entry.name)
            if kind != ".json":
                continue
            at = owner, unicodedata.normalize("NFC", name)
            there.add(at)
            with contextlib.suppress(FileNotFoundError):  # another server has removed the file
                if at not in self._known or self._known[at].file != _file(entry.stat()):
                    self._load(*at, entry.path)
        for at in {at for at in self._known if at[0] == owner} - there:
            del self._known[at]

    def _load(self, owner: str, name: str, path: str | Path) -> Text | None:
        """Load a text from its file, update `_known`, and return the text; None if the file is missing, unreadable or
        damaged."""
        before, file = self._known.get((owner, name)), ()
        try:
            file = _file(os.stat(path))
            with open(path, "rb") as opened:
                file, content = _file(os.fstat(opened.fileno())), json.loads(opened.read())
            text, asked = content["text"], content.get("asked", {})
            if content != _content(owner, name, text, asked):
                raise ValueError("its checksum is not that of its content")
        except FileNotFoundError:
            self._known.pop((owner, name), None)
            return None
        except OSError as error:  # the file may be readable later, so the caches of its text are kept
            self._troubles.note("a stored text cannot be read", error)
            self._note(owner, name, (before or _Known(0, None))._replace(file=file))
            return None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            if before is None or before.mark is not None or before.file != file:
                log.note("a stored text is damaged and not known", logging.WARNING, file=str(path), reason=str(error))
            self._note(owner, name, _Known(0, None, file))
            return None
        if before is None or before.mark is None or before.file != file:
            self._note(owner, name, _Known(_size(text), mark_of(owner, text), file))
        return Text(text, asked)

    def _note(self, owner: str, name: str, known: _Known) -> None:
        self._known[owner, name] = known
        if known.mark is not None:
            self._marks.add(known.mark)

    def _path(self, owner: str, name: str) -> Path:
        return self.folder / owner / f"{checked(name)}.json"


def _file(stat: os.stat_result) -> tuple:
    """Return properties of a file that differ after another file has replaced it."""
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def _content(owner: str, name: str, text: str, asked: Json) -> Json:
    """Return the JSON content of a text's file, with a checksum of it."""
    more = (json.dumps(asked, sort_keys=True),) if asked else ()
    digest = hashlib.sha256("\0".join((owner, name, text, *more)).encode("utf-8", "surrogatepass")).hexdigest()
    return dict(format=FORMAT, name=name, text=text, sha256=digest) | (dict(asked=asked) if asked else {})


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))
