"""Words: one meaning each, and the field's own. `python tests/docs/test_words.py` prints every word that has a better
one; `--write` takes files without any off `words_todo.txt`, the list of files that still wait to be rewritten."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TODO = Path(__file__).with_name("words_todo.txt")
DATA = {"kvevict/evaluate/words.py"}  # lists of English words, of which made-up texts consist
SUFFIXES = {".py", ".md", ".c", ".h", ".cu", ".cuh", ".cpp", ".sh", ".toml", ".tsv", ".html", ".yml", ".yaml"}

# What is written -> what to write. Also as a part of a name: view_behind.
BETTER = {
    r"behind": "after, follows",
    r"(?<!there )(is|are|was|were) no (?!longer|more|such|other|wider|less|later|different|\w+ than)\w+": "is not a",
    r"there (is|are) no [\w -]{1,30} that": "no ... does",
    r"mend(s|ed|ing)?": "fix, repair",
    r"(pays?|paid)": "attention weight; attends",
    r"stretch(es|ed|ing)?": "rope_depends_on_length, scales with the length",
    r"(bent|bends?|bending)": "softcap_grad, capped",
    r"odds": "unsupported_reasons",
    r"one way to (evict|keep|choose)": "a policy",
    r"goes on from here": "continues; a copy-on-write fork",
    r"(read|reads|reading) (it |the prompt |a prompt )?whole": "in one pass",
    r"turn(s|ed|ing)? (its |their |the |stored |his )?(quer(y|ies)|keys?)": "rotates",
    r"emulator alone": "only tested under emulation",
    r"upcoming": "next_position",
    r"by itself": "on its own, independently",
    r"is told|are told|was told": "is given, knows",
}
PATTERNS = [
    (re.compile(rf"(?<![A-Za-z]){pattern}(?![A-Za-z])", re.IGNORECASE), word) for pattern, word in BETTER.items()
]


def tracked() -> list:
    """Paths of the sources and pages, of which a test copy without git has all files."""
    run = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    names = run.stdout.splitlines() or [str(p.relative_to(ROOT)) for p in ROOT.rglob("*") if p.is_file()]
    wanted = (name for name in names if Path(name).suffix in SUFFIXES or name.startswith(".ci/"))
    own = f"tests/docs/{Path(__file__).name}"
    return sorted(name for name in wanted if name not in {own, *DATA} and (ROOT / name).is_file())


def found(name: str) -> list:
    """(line, what stands there, what to write) of a file."""
    text = (ROOT / name).read_text(encoding="utf-8")
    hits = ((m.start(), m[0], word) for pattern, word in PATTERNS for m in pattern.finditer(text))
    return sorted((text.count("\n", 0, at) + 1, " ".join(words.split()), word) for at, words, word in hits)


@pytest.mark.quick
def test_words():
    names = sorted(set(tracked()) - set(TODO.read_text().split()))
    assert len(names) > 100
    assert not [f"{name}:{line}: {words!r}, better {word!r}" for name in names for line, words, word in found(name)]


def test_what_waits_exists():
    names = TODO.read_text().split()
    assert names == sorted(set(names)) and all((ROOT / name).is_file() for name in names)


@pytest.mark.parametrize("text, count", [
    ("the rows behind it", 1), ("view_behind = 1", 1), ("it is no window", 1), ("there is no folder x", 0),
    ("are no longer", 0), ("there is no path that fits", 1), ("amendment, recommended", 0), ("paid=None", 1),
    ("reads the prompt whole", 1), ("turns queries by", 1), ("chat turns", 0),
])  # fmt: skip
def test_the_lint(text, count):
    assert sum(len(pattern.findall(text)) for pattern, _ in PATTERNS) == count


if __name__ == "__main__":
    left = [name for name in tracked() if found(name)]
    if sys.argv[1:] == ["--write"]:
        waiting = TODO.read_text().split()
        TODO.write_text("".join(f"{name}\n" for name in left if name in waiting))
    for name in left:
        print(*(f"{name}:{line}: {words!r}, better {word!r}" for line, words, word in found(name)), sep="\n")
