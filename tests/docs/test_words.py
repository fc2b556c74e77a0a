"""Words: one meaning each, and the field's own; and few relative clauses in place of nouns. `python
tests/docs/test_words.py` prints every word that has a better one, and the densities of files above a limit."""

import ast
import io
import re
import subprocess
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DATA = {"kvevict/lab/evaluate/words.py"}  # lists of English words, of which made-up texts consist
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


# Words per 1,000 of a file's comments and docstrings, or of a page's prose; one of each is always allowed.
LIMITS = {("what",): 2, ("which", "whose"): 3, ("own",): 1}
COMMENTED = {".py", ".md", ".c", ".h", ".cu", ".cuh", ".cpp"}


def prose(suffix: str, text: str) -> str:
    """The comments and docstrings of a source, or a page without its code."""
    if suffix == ".md":
        return re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.DOTALL | re.MULTILINE)
    if suffix != ".py":
        return " ".join(re.findall(r"/\*.*?\*/|//[^\n]*", text, re.DOTALL))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(text)) if isinstance(node, documented)]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return " ".join([*docs, *(token.string for token in tokens if token.type == tokenize.COMMENT)])


def dense(suffix: str, text: str) -> dict:
    """{word: (count, limit)} of the words that are above their limit."""
    words = re.findall(r"[a-z']+", prose(suffix, text).lower())
    found = {kind: sum(map(words.count, kind)) for kind in LIMITS}
    limits = {kind: max(1, limit * len(words) // 1000) for kind, limit in LIMITS.items()}
    return {"/".join(kind): (found[kind], limits[kind]) for kind in LIMITS if found[kind] > limits[kind]}


def dense_files() -> dict:
    files = (name for name in tracked() if Path(name).suffix in COMMENTED and not name.startswith("docs/CHANGELOG"))
    densities = {name: dense(Path(name).suffix, (ROOT / name).read_text(encoding="utf-8")) for name in files}
    return {name: words for name, words in densities.items() if words}


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
    names = tracked()
    assert len(names) > 100
    assert not [f"{name}:{line}: {words!r}, better {word!r}" for name in names for line, words, word in found(name)]


@pytest.mark.quick
def test_density():
    """Names in place of relative clauses."""
    assert dense_files() == {}


@pytest.mark.parametrize("suffix, text, found", [
    (".py", "# what it is, and what it was\nx = 1", {"what": (2, 1)}),
    (".py", 'def f():\n    """Which of those, whose own."""\n    return "what what"', {"which/whose": (2, 1)}),
    (".c", "/* its own */ int own, what; // its own", {"own": (2, 1)}),
    (".md", "what\n```sh\nwhat what\n```\n`what`", {}),
    (".md", "word " * 996 + "what " * 3, {"what": (3, 1)}), (".md", "word " * 998 + "what " * 2, {}),
])  # fmt: skip
def test_the_density(suffix, text, found):
    assert dense(suffix, text) == found


@pytest.mark.parametrize("text, count", [
    ("the rows behind it", 1), ("view_behind = 1", 1), ("it is no window", 1), ("there is no folder x", 0),
    ("are no longer", 0), ("there is no path that fits", 1), ("amendment, recommended", 0), ("paid=None", 1),
    ("reads the prompt whole", 1), ("turns queries by", 1), ("chat turns", 0),
])  # fmt: skip
def test_the_lint(text, count):
    assert sum(len(pattern.findall(text)) for pattern, _ in PATTERNS) == count


if __name__ == "__main__":
    for name in tracked():
        print(
            *(f"{name}:{line}: {written!r}, better {word!r}\n" for line, written, word in found(name)), sep="", end=""
        )
    for name, over in dense_files().items():
        print(name, *(f"{count} {word!r}, limit {limit}" for word, (count, limit) in over.items()), sep=": ")
