"""How long tests take: tests/durations.tsv, a line for each test function that takes half a second or more.

KVEVICT_DURATIONS=tests/durations.tsv python -m pytest -q tests    writes it, as `.ci/run all` does
python tests/lib/durations.py                                      fails if a test above SLOW s has no mark `slow`
"""

import ast
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "tests/durations.tsv"
HEAD = "test\tcases\tseconds\tlongest\n"
SLOW = 5.0  # seconds of one case
LEAST = 0.5  # seconds of all cases of a function that the table lists


def read() -> dict:
    """{"file::function": (cases, seconds of all, seconds of the longest)}"""
    rows = (line.split("\t") for line in TABLE.read_text(encoding="utf-8").splitlines()[1:])
    return {test: (int(cases), float(total), float(longest)) for test, cases, total, longest in rows}


def write(path, seconds: dict) -> None:
    """`seconds` of each case by node id. Functions that were not run keep their lines."""
    functions = defaultdict(list)
    for case, spent in seconds.items():
        functions[case.partition("[")[0]].append(spent)
    table = read() if TABLE.is_file() else {}
    table |= {test: (len(spent), sum(spent), max(spent)) for test, spent in functions.items()}
    lines = (f"{test}\t{n}\t{total:.1f}\t{most:.1f}\n" for test, (n, total, most) in sorted(table.items())
             if total >= LEAST and (ROOT / test.partition("::")[0]).is_file())  # fmt: skip
    Path(path).write_text(HEAD + "".join(lines), encoding="utf-8")


def unmarked(file: Path) -> set:
    """Functions of a file without the mark `slow`; none if it is the file's `pytestmark`."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    slow = lambda node: "pytest.mark.slow" in ast.unparse(node)  # noqa: E731
    if any(isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark" and slow(node.value)
           for node in tree.body):  # fmt: skip
        return set()
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return {node.name for node in functions if not any(map(slow, node.decorator_list))}


def main() -> int:
    wrong = []
    for test, (_, _, longest) in read().items():
        file, _, function = test.partition("::")
        if longest > SLOW and (ROOT / file).is_file() and function.split("::")[-1] in unmarked(ROOT / file):
            wrong.append(f"{test} takes {longest} s: mark it with @pytest.mark.slow, or make it faster")
    print(*wrong, sep="\n", end="\n" * bool(wrong))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
