"""Every public function of the package is annotated: all arguments, and the result. Public: no name on its path
begins with an underscore. `*args` and `**options` may be bare."""

import ast
from pathlib import Path

import pytest

import kvevict

PACKAGE = Path(__file__).parents[2] / "kvevict"


def bare(node) -> list:
    """(line, name) of the public functions of a module or class that lack an annotation."""
    found = []
    for each in ast.iter_child_nodes(node):
        name = getattr(each, "name", None) or ""
        if not isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found += [] if name.startswith("_") else bare(each)
        elif not name.startswith("_"):
            arguments = [*each.args.posonlyargs, *each.args.args, *each.args.kwonlyargs]
            parts = [a.annotation for a in arguments if a.arg not in ("self", "cls")]
            found += [] if all([*parts, each.returns]) else [(each.lineno, name)]
    return found


@pytest.mark.quick
def test_public_functions_are_annotated():
    files = list(PACKAGE.rglob("*.py"))
    assert len(files) > 200
    trees = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text("utf-8")) for path in files}
    assert not [f"{path}:{line} {name}" for path, tree in trees.items() for line, name in bare(tree)]


@pytest.mark.parametrize("text, names", [
    ("def f(a: int, *args, b: int = 0, **options) -> None: pass", []),
    ("def f(a) -> None: pass", ["f"]), ("def f(*, a=0) -> None: pass", ["f"]), ("def f(a, /) -> None: pass", ["f"]),
    ("def f(a: int): pass", ["f"]), ("async def f(): pass", ["f"]), ("def _f(a): pass", []),
    ("class A:\n    def __init__(self, a): pass\n    def f(self): pass", ["f"]),
    ("class A:\n    def f(self) -> int: pass\n    @classmethod\n    def g(cls) -> int: pass", []),
    ("class _A:\n    def f(self): pass", []), ("def f() -> None:\n    def g(): pass", []),
    ("try:\n    pass\nexcept OSError as _e:\n    pass\nelse:\n    def f(): pass", ["f"]),
])  # fmt: skip
def test_what_counts(text, names):
    assert [name for _, name in bare(ast.parse(text))] == names


def test_type_checkers_see_every_public_name():
    """A strict one takes what `kvevict.api` imports for private, unless it says `as`."""
    body = ast.parse((PACKAGE / "api.py").read_text("utf-8")).body
    names = [a.asname for each in body if isinstance(each, ast.ImportFrom) for a in each.names if a.asname == a.name]
    names += [each.name for each in body if isinstance(each, ast.FunctionDef)]
    assert sorted(names) == sorted(kvevict.__all__)
