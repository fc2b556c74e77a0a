"""The tests that a change touches, for `.ci/run quick`: by names and imports, not by running anything."""

import re
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path

import durations
from imports import imported

ROOT = Path(__file__).parents[2]
SECONDS = 50  # of one core, by durations.tsv: so many of the touched tests are run
UNKNOWN = 0.3  # seconds of a function that durations.tsv does not list


def changed() -> list:
    """Paths that differ from the last commit; if none does, those that it changed."""

    def git(*arguments):
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()

    return git("diff", "--name-only", "HEAD") + git("ls-files", "-o", "--exclude-standard") or git(
        "diff", "--name-only", "HEAD~1", "HEAD"
    )


@cache
def nearest() -> list:
    """Test files nearest to the changed files, until SECONDS are full: first changed test files and those with a
    changed file's name, then files that import or name it, then files that import its importers."""
    distance: dict = {}
    for path in changed():
        for file, steps in _distances(path).items():
            distance[file] = min(steps, distance.get(file, steps))
    seconds, chosen, left = Counter(), [], float(SECONDS)
    for function, (_, spent, _) in durations.read().items():
        seconds[function.partition("::")[0]] += spent
    for file in sorted(distance, key=lambda file: (distance[file], file)):
        if left > 0:
            chosen.append(file)
            left -= seconds[file]
    return chosen


def chosen_of(functions: list) -> set:
    """The test functions ("tests/ops/test_attend.py::test_matches") of the nearest files, until SECONDS are full."""
    known, chosen, left = durations.read(), set(), float(SECONDS)
    order = {file: number for number, file in enumerate(nearest())}
    for function in sorted(functions, key=lambda function: order.get(function.partition("::")[0], len(order))):
        left -= known[function][1] if function in known else UNKNOWN
        if left < 0 or function.partition("::")[0] not in order:
            break
        chosen.add(function)
    return chosen


def _distances(path: str) -> dict:
    """{test file: how far from the changed file}"""
    name, stem = Path(path), re.sub(r"_(cpu|cuda)$", "", Path(path).stem)
    tests = {f"test_{stem}.py", f"test_{stem.removesuffix('s')}.py", f"test_{name.parent.name}.py"}
    found = {file: 0 for file in _tests() if file == path or Path(file).name in tests}
    if name.suffix == ".md":
        found |= {file: 1 for file in _tests() if file.startswith("tests/docs/")}
    elif name.parts[0] == "csrc":
        found |= {file: 1 for file in _tests() if file.startswith("tests/ops/")} if name.suffix != ".c" else {}
    elif name.parts[0] == "tests":
        found |= {file: 1 for file in _tests() if re.search(rf"^\s*(import|from) {stem}\b", _text(file), re.M)} | found
    elif name.parts[0] == "kvevict" and name.suffix == ".py":
        level, seen = {path}, set()
        for steps in range(1, 4):
            modules = {file for file in level if file.startswith("kvevict/")} - seen
            seen |= modules
            users = {user for user, imports in _imports().items() if imports & modules}
            found |= {file: steps for file in users if file.startswith("tests/") and file not in found}
            level = users
        found |= {file: 1 for file in _tests() if found.get(file, 9) > 1 and Path(file).parent.name == name.parent.name}
        named = re.compile(rf"\b{stem}\b")
        found |= {file: 2 for file in _tests() if found.get(file, 9) > 2 and named.search(_text(file))}
    return found


@cache
def _tests() -> list:
    return sorted(str(file.relative_to(ROOT)) for file in ROOT.glob("tests/*/test_*.py"))


@cache
def _text(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


@cache
def _imports() -> dict:
    """{file: files of the package that it imports}"""
    package, found = [str(file.relative_to(ROOT)) for file in ROOT.glob("kvevict/**/*.py")], {}
    for file in [*package, *_tests()]:
        relative = Path(file).relative_to("kvevict") if file.startswith("kvevict/") else Path(file)
        found[file] = {module for path in imported(relative, _text(file)) if (module := _module(path))}
    return found


def _module(path: tuple):
    """The file of the longest part of an import that is a module; the package's `__init__` is not counted, since it
    imports nothing until it is used."""
    for end in range(len(path), 1, -1):
        file = "/".join(path[:end])
        for candidate in (f"{file}.py", f"{file}/__init__.py"):
            if (ROOT / candidate).is_file():
                return candidate
    return None
