"""Texts that requests open by their names. A cache that is lost is read from its text again."""

import contextlib
import hashlib
import json
import logging
import os
import threading
import time
import unicodedata
from pathlib import Path
from typing import Any, NamedTuple

from ..store import files
from . import log
from .errors import Refused
from .log import Troubles
from .prefixes import mark_of

FORMAT = "kvevict-text-1"
LETTERS, BYTES = 100, 240  # most letters of a name, most bytes of it as a file's
SETTLED = 2  # seconds to which file systems may round a folder's mtime: two changes can then share it
EVERY = 60  # seconds between looks at all folders: some file systems keep no time of change
JOINERS = "\u200c\u200d"  # letters that words of many scripts have


def checked(name: object) -> str:
    """Return a text's name in NFC. Raises Refused for a name that could be more than a file's."""
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
    """A text, and the policy and budget that it was stored with."""

    text: str
    asked: dict


class _Known(NamedTuple):
    """What this server knows of a text.

    mark   the text's part of the names of its prefixes; None: the text's file is damaged
    file   facts of the file that change when another replaces it
    whole  the text, if there are no files
    """

    size: int
    mark: str | None
    file: tuple = ()
    whole: Text | None = None


class Texts:
    """Texts by owner and name, in files if there is a folder. Servers may share the folder: a text is looked for there
    each time, so that every server knows the texts that one has stored or deleted.

    most  most bytes of all texts
    """

    def __init__(self, most: int, folder: str | Path | None = None) -> None:
        self.most = most
        self.folder: Any = None if folder is None else Path(folder)
        self._known: dict = {}  # (owner, name) -> `_Known`
        self._looked: dict = {}  # owner -> (when its folder had changed, when it was looked at)
        self._marks: set = set()  # marks of the texts known at or since the last `gone`
        self._lock = threading.RLock()  # held while these are read or changed
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
        """Raise Refused if a text cannot be stored: it does not fit, or the name is another's that may not be
        replaced."""
        with self._lock:
            there = None if replace else self._text(owner, name)
            used, before = self.bytes, self._known.get((owner, name))
        if there is not None and there.text != text:
            raise Refused(409, f"there is a text {name!r} already: give another name", "text_exists", "name")
        size = used - (before.size if before else 0) + _size(text)
        if size > self.most:
            raise Refused(507, f"the texts would take {size} bytes, and the server stores {self.most}: delete some")

    def put(
        self, owner: str, name: str, text: str, replace: bool = True, asked: dict[str, Any] | None = None
    ) -> str | None:
        """Store a text, and return the mark of the text that had the name. replace: whether that may be another text;
        asked: the policy and budget, if not the server's. Raises Refused if the text does not fit or cannot be
        written."""
        whole = Text(text, {key: value for key, value in (asked or {}).items() if value is not None})
        with self._lock:
            self.check(owner, name, text, replace)
            before = self._known.get((owner, name))
            if self.folder is None:
                self._note(owner, name, _Known(_size(text), mark_of(owner, text), whole=whole))
                return before and before.mark
            replace = replace or before is not None  # the same text, or a damaged one
            path, said = self._path(owner, name), json.dumps(_said(owner, name, *whole))
            try:
                path.parent.mkdir(mode=0o700, exist_ok=True)
                files.write(path, said, mode=0o600, replace=replace)
            except FileExistsError:  # another server was faster
                self.check(owner, name, text, replace)
            except OSError as error:
                raise Refused(507, f"the text cannot be stored: {error.strerror}") from None
            self._load(owner, name, path)
            return before and before.mark

    def get(self, owner: str, name: str) -> Text:
        """Return a text. Raises Refused for a text that the owner does not have."""
        found = self._text(owner, checked(name))
        if found is None:
            raise Refused(404, f"text {name!r} does not exist: store it with POST /v1/kvevict/texts", "text_not_found")
        return found

    def remove(self, owner: str, name: str) -> str:
        """Forget a text, and return its mark. Raises Refused for a text that the owner does not have."""
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

    def gone(self, *marks: str | None) -> set:
        """Return the marks of deleted texts: those deleted since the last call, and those of `marks` that no stored
        text has."""
        with self._lock:
            self._refresh()
            known = {each.mark for each in self._known.values()}
            found, self._marks = (self._marks | set(marks)) - known, known
            return found - {None}

    def of(self, owner: str) -> list[tuple[str, int]]:
        """List (name, bytes) of an owner's texts."""
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
        """Look at the folders that have changed, and at all folders after `every` seconds. Where a folder cannot be
        read, what is known stays."""
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

    def _look(self, owner: str, entries: Any) -> None:
        """Note the new files in an owner's folder, and forget those that are gone."""
        there = set()
        for entry in entries:  # a thousand files take milliseconds; as `Path`s, ten times as long
            name, kind = os.path.splitext(entry.name)
            if kind != ".json":
                continue
            at = owner, unicodedata.normalize("NFC", name)
            there.add(at)
            with contextlib.suppress(FileNotFoundError):  # another server was faster
                if at not in self._known or self._known[at].file != _file(entry.stat()):
                    self._load(*at, entry.path)
        for at in {at for at in self._known if at[0] == owner} - there:
            del self._known[at]

    def _load(self, owner: str, name: str, path: str | Path) -> Text | None:
        """Load a text from its file, and note all of it but its letters. None if the file is missing or damaged."""
        before, file = self._known.get((owner, name)), ()
        try:
            file = _file(os.stat(path))
            with open(path, "rb") as opened:
                file, said = _file(os.fstat(opened.fileno())), json.loads(opened.read())
            text, asked = said["text"], said.get("asked", {})
            if said != _said(owner, name, text, asked):
                raise ValueError("its checksum is not that of its content")
        except FileNotFoundError:
            self._known.pop((owner, name), None)
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, OSError):
                self._troubles.note("a stored text cannot be read", error)
            elif before is None or before.mark is not None or before.file != file:
                told = "a stored text is damaged and not known"
                log.note(told, logging.WARNING, file=str(path), reason=str(error))
            stays = before is not None and isinstance(
                error, OSError
            )  # the file may be read later, so the prefixes stay
            self._note(owner, name, before._replace(file=file) if stays else _Known(0, None, file))
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


def _file(stat: Any) -> tuple:
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def _said(owner: str, name: str, text: str, asked: dict) -> dict:
    more = (json.dumps(asked, sort_keys=True),) if asked else ()
    digest = hashlib.sha256("\0".join((owner, name, text, *more)).encode("utf-8", "surrogatepass")).hexdigest()
    return dict(format=FORMAT, name=name, text=text, sha256=digest) | (dict(asked=asked) if asked else {})


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))
