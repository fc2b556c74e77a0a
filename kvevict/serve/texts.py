"""Texts that requests open by their names. A cache of one can be lost; its text is what it is read from again."""

import contextlib
import hashlib
import json
import threading
import unicodedata
from pathlib import Path

from .. import files
from .errors import Refused
from .log import LOG

FORMAT = "kvevict-text-1"
LETTERS, BYTES = 100, 240  # of a name at most; the latter as a file has it
JOINERS = "\u200c\u200d"  # in words of many scripts


def checked(name) -> str:
    """A text's name, as it is compared. Raises Refused for one that could be more than a file name."""
    found = unicodedata.normalize("NFC", name) if isinstance(name, str) else ""
    fits = 0 < len(found) <= LETTERS and len(found.encode("utf-8", "replace")) <= BYTES
    fits = fits and all(each.isprintable() or each in JOINERS for each in found)
    if not (fits and found == found.strip() and found[0] != "." and not set("/\\") & set(found)):
        raise Refused(
            400, f"name must be 1 to {LETTERS} letters, {BYTES} bytes at most, without slashes and a dot or a space in "
            "front", param="name",
        )  # fmt: skip
    return found


class Texts:
    """Texts by owner and name, in memory, and in files if there is a folder.

    most   bytes of all texts at most
    """

    def __init__(self, most: int, folder=None):
        self.most, self.folder = most, None if folder is None else Path(folder)
        self._texts: dict = {}  # (owner, name) -> (text, bytes, policy and budget that it asks for)
        self._lock = threading.Lock()  # held by who changes texts
        self.bytes = 0
        if self.folder is not None:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for path in sorted(self.folder.glob("*/*.json")):
                self._load(path)

    def _load(self, path) -> None:
        try:
            said = json.loads(path.read_bytes())
            owner, name, text = path.parent.name, unicodedata.normalize("NFC", path.stem), said["text"]
            asked = said.get("asked", {})
            if said != _said(owner, name, text, asked):
                raise ValueError("its checksum is not that of its content")
        except (OSError, ValueError, KeyError, TypeError) as error:
            LOG.warning(
                "a stored text is damaged and not known", extra={"facts": {"file": str(path), "reason": str(error)}}
            )
            return
        self._texts[owner, name] = text, _size(text), asked
        self.bytes += _size(text)

    def free(self, owner: str, name: str, text: str) -> None:
        """Raise Refused where the name is another text's."""
        if self._texts.get((owner, name), (text,))[0] != text:
            raise Refused(409, f"there is a text {name!r} already: give another name", "text_exists", "name")

    def fits(self, owner: str, name: str, text: str) -> int:
        """Bytes of all texts with this one. Raises Refused where these are too many."""
        size = self.bytes - self._texts.get((owner, name), ("", 0))[1] + _size(text)
        if size > self.most:
            raise Refused(507, f"the texts would take {size} bytes, and the server stores {self.most}: delete some")
        return size

    def put(self, owner: str, name: str, text: str, replace: bool = True, asked: dict | None = None) -> str | None:
        """Store a text, in place of the one of this name, which is returned, if it may be replaced. asked: how it is
        read, where that is not the server's way. Raises Refused where it does not fit or cannot be written."""
        asked = {key: value for key, value in (asked or {}).items() if value is not None}
        with self._lock:
            if not replace:
                self.free(owner, name, text)
            size = self.fits(owner, name, text)
            before = self._texts.get((owner, name), (None,))[0]
            if self.folder is not None:
                path = self._path(owner, name)
                try:
                    path.parent.mkdir(mode=0o700, exist_ok=True)
                    files.write(path, json.dumps(_said(owner, name, text, asked)), mode=0o600)
                except OSError as error:
                    raise Refused(507, f"the text cannot be stored: {error.strerror}") from None
            self._texts[owner, name], self.bytes = (text, _size(text), asked), size
            return before

    def get(self, owner: str, name: str) -> str:
        """Raises Refused for a text that the owner does not have."""
        try:
            return self._texts[owner, checked(name)][0]
        except KeyError:
            raise Refused(
                404, f"there is no text {name!r}: store it with POST /v1/kvevict/texts", "text_not_found"
            ) from None

    def asked(self, owner: str, name: str) -> dict:
        """The policy and the budget that a text asks for."""
        return self._texts.get((owner, name), ("", 0, {}))[2]

    def remove(self, owner: str, name: str) -> str:
        """Forget a text, which is returned. Raises Refused for one that the owner does not have."""
        with self._lock:
            text = self.get(owner, name)
            self.bytes -= self._texts.pop((owner, name))[1]
            if self.folder is not None:
                with contextlib.suppress(FileNotFoundError):
                    self._path(owner, name).unlink()
            return text

    def knows(self, owner: str, text: str) -> bool:
        """Whether a text is stored under any name of the owner's."""
        return any(whose == owner and each == text for (whose, _), (each, *_) in list(self._texts.items()))

    def of(self, owner: str) -> list:
        """(name, bytes) of an owner's texts."""
        return sorted((name, size) for (whose, name), (_, size, _) in list(self._texts.items()) if whose == owner)

    def _path(self, owner, name) -> Path:
        return self.folder / owner / f"{checked(name)}.json"


def _said(owner, name, text, asked) -> dict:
    more = (json.dumps(asked, sort_keys=True),) if asked else ()
    digest = hashlib.sha256("\0".join((owner, name, text, *more)).encode("utf-8", "surrogatepass")).hexdigest()
    return dict(format=FORMAT, name=name, text=text, sha256=digest) | (dict(asked=asked) if asked else {})


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))
