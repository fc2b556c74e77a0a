"""Reads and writes the file of an evaluation: first a line {"settings": ...}, then a line per (case, run)."""

import contextlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...policy.checks import PLENTY, byte_count, parsed
from .runs import LAST
from .tasks import FIDELITY

CASE = ("task", "id", "seed")
Line = dict[str, Any]  # the fields of a line: `FIELDS`, and some of `OPTIONAL`
Check = Callable[[Any], bool]


def _number(most: float) -> Check:
    return lambda x: isinstance(x, (int, float)) and not isinstance(x, bool) and not most < abs(x) < math.inf


def _or_none(fits: Check) -> Check:
    return lambda x: x is None or fits(x)


def _all(fits: Check) -> Check:
    return lambda x: isinstance(x, list) and all(map(fits, x))


def _text(x: object) -> bool:
    return isinstance(x, str)


def _budget(x: object) -> bool:
    if not isinstance(x, str):
        return _number(PLENTY)(x)
    with contextlib.suppress(ValueError):
        return byte_count("budget", x) > 0
    return False


def _tags(x: dict) -> bool:
    return isinstance(x, dict) and all(_text(tag) or isinstance(tag, bool) or _number(1e18)(tag) for tag in x.values())


_counts = _all(_number(PLENTY))
# {field of a line: its check}. Numbers are limited so that their sums and squares are finite.
FIELDS = dict(
    task=_text, id=lambda x: isinstance(x, (str, int)), seed=lambda x: isinstance(x, int), policy=_text, metric=_text,
    budget=_or_none(_budget), chunk_size=_or_none(_number(PLENTY)), mode=_or_none(_text), score=_number(1e9),
    tags=_tags,
)  # fmt: skip
_measure = _number(1e18)
OPTIONAL = dict(
    same=_number(1), kept=_all(_or_none(_counts)), response=_counts, nats=_number(1e9), cache_bytes=_measure,
    peak_cache_bytes=_measure, archive_bytes=_measure, recalled_bytes=_measure, read_seconds=_or_none(_measure),
    ask_seconds=_measure, ask_bytes=_measure,
)  # fmt: skip
KEY = (*CASE, "policy", "budget", "chunk_size", "mode")  # the case and the `RunSpec`, which identify a line
OLD_MODES = {"aware": "known", "agnostic": "later"}  # {a mode's name in files of earlier versions: its name now}
# Settings that a later run with the same file may change
ADDED = {"policies", "budgets", "chunk_sizes", "modes", "given"}


class Results:
    """A results file that is open for more lines. An incomplete last line, which a killed process leaves, is cut off.
    Raises ValueError if the file was begun with other settings: only those in `ADDED` may differ, and with a protocol
    none.

    keys        the values of `KEY` of every line
    responses   {values of `CASE`: ids that the full run generated}
    """

    def __init__(self, path: str | Path, settings: dict) -> None:
        self.keys, self.responses = set(), {}
        path, settings = Path(path), json.loads(json.dumps(settings))
        begun = path.exists() and not _only_a_start(path)
        if begun:
            before, lines = read(path)
            _same(path, before, settings)
            for line in lines:
                self._note(line)
        if path.exists():
            complete = path.read_bytes().rfind(b"\n") + 1  # number of bytes up to the end of the last complete line
            with path.open("r+b") as file:
                file.truncate(complete)
        self.file = path.open("a", encoding="utf-8")
        if not begun:
            self._append({"settings": settings})

    def write(self, line: Line) -> None:
        self._append(line)
        self._note(line)

    def _append(self, line: dict) -> None:
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()

    def _note(self, line: dict) -> None:
        self.keys.add(tuple(line[name] for name in KEY))
        if "response" in line:
            self.responses[tuple(line[name] for name in CASE)] = line["response"]

    def __enter__(self) -> "Results":
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()


def read(path: str | Path) -> tuple[dict, list[Line]]:
    """Read (settings, lines) of a results file, without an incomplete last line and with the modes' present names.
    Raises ValueError for other files."""
    first, *rest = Path(path).read_bytes().split(b"\n")  # the last item is empty or an incomplete line
    try:
        settings = parsed(first)["settings"]
    except (ValueError, TypeError, KeyError):
        settings = None
    if not isinstance(settings, dict):
        raise ValueError(f"{path} holds no results of `kvevict eval`, settings first, in lines; give another file")
    settings.setdefault("question", LAST)  # in files of earlier versions
    if isinstance(settings.get("modes"), list):
        settings["modes"] = [OLD_MODES.get(str(mode), mode) for mode in settings["modes"]]
    return settings, [_line(path, *numbered) for numbered in enumerate(rest[:-1], 2)]


def _line(path: str | Path, number: int, text: bytes) -> dict:
    line: Any = None
    wrong = ["not a JSON object"]
    with contextlib.suppress(ValueError):
        line = parsed(text)
    if isinstance(line, dict):
        wrong = [name for name, fits in FIELDS.items() if name not in line or not fits(line[name])]
        wrong += [name for name, fits in OPTIONAL.items() if name in line and not fits(line[name])]
        wrong += ["same"] if line.get("metric") == FIDELITY and "same" not in line else []
    if wrong:
        raise ValueError(
            f"line {number} of {path} is damaged ({', '.join(wrong)}); delete the line to measure it again"
        )
    return line | dict(mode=OLD_MODES.get(line["mode"], line["mode"]))


def _only_a_start(path: str | Path) -> bool:
    """Return whether a file holds only a part of its first line, the settings."""
    text, start = path.read_bytes(), b'{"settings": '
    return not set(text) & set(b"\r\n") and (text.startswith(start) or start.startswith(text))


def _same(path: str | Path, before: dict, now: dict) -> None:
    names = [name for name in before | now if before.get(name) != now.get(name)]
    if names and (before.get("protocol") or set(names) - ADDED):
        differs = "; ".join(f"{name} was {before.get(name)!r}, is {now.get(name)!r}" for name in names)
        raise ValueError(f"{path} was begun with other settings: {differs}; repeat those or give another --out")
