"""The file of an evaluation: a line {"settings": ...}, then a line per (case, run)."""

import json
from pathlib import Path

CASE = ("task", "id", "seed")
KEY = (*CASE, "policy", "budget", "chunk_size", "mode")  # no two lines share these: the case, and its `Run`'s fields


class Results:
    """A file open for more lines. Lines are added, never changed; what a killed process left of its last line is cut
    off. ValueError where the file was begun with other settings.

    keys        the values of `KEY` of every line there is
    responses   values of `CASE` -> ids that the full run generated
    """

    def __init__(self, path, settings: dict):
        self.keys, self.responses = set(), {}
        settings = json.loads(json.dumps(settings))
        path = Path(path)
        begun = path.exists() and not _only_a_start(path)
        if begun:
            before, lines = read(path)
            _same(path, before, settings)
            for line in lines:
                self._note(line)
        if path.exists():
            _cut_half_line(path)
        self.file = path.open("a", encoding="utf-8")
        if not begun:
            self._append({"settings": settings})

    def write(self, line: dict) -> None:
        self._append(line)
        self._note(line)

    def _append(self, line):
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()

    def _note(self, line):
        self.keys.add(tuple(line[name] for name in KEY))
        if "response" in line:
            self.responses[tuple(line[name] for name in CASE)] = line["response"]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()


def read(path) -> tuple:
    """(settings, lines) of a results file; a half-written last line is left out."""
    text = Path(path).read_bytes()
    lines = []
    for number, line in enumerate(text[: text.rfind(b"\n") + 1].splitlines(), 1):
        try:
            lines.append(json.loads(line))
        except ValueError:
            raise ValueError(f"line {number} of {path} is damaged; take it out to have it measured again") from None
    if not lines or not isinstance(lines[0], dict) or "settings" not in lines[0]:
        raise ValueError(f"{path} holds no results of `kvevict eval`; give another file")
    return lines[0]["settings"], lines[1:]


def _only_a_start(path) -> bool:
    """Whether a file is empty, or was killed while its first line was written."""
    text, start = path.read_bytes(), b'{"settings": '
    return b"\n" not in text and (text.startswith(start) or start.startswith(text))


def _cut_half_line(path) -> None:
    size = path.read_bytes().rfind(b"\n") + 1
    with path.open("r+b") as file:
        file.truncate(size)


def _same(path, before: dict, now: dict) -> None:
    names = [name for name in before | now if before.get(name) != now.get(name)]
    if names:
        differs = "; ".join(f"{name} was {before.get(name)!r}, is {now.get(name)!r}" for name in names)
        raise ValueError(f"{path} was begun with other settings: {differs}; repeat those or give another --out")
