"""Names that a Python file imports from the package, read from its text."""

import ast
from pathlib import Path


def imported(file: Path, text: str):
    """Names of the package that a file imports, as paths: ("kvevict", "engine", "evict", "choose"). `file` is relative
    to the package; a file outside has only absolute imports. Imports under `if TYPE_CHECKING` count, too."""
    folder = file.parent.parts
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names if _ours(alias.name))
        elif isinstance(node, ast.ImportFrom) and (node.level or _ours(node.module)):
            base = ("kvevict", *folder[: len(folder) - node.level + 1]) if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            yield from ((*base, alias.name) for alias in node.names)


def _ours(name: str) -> bool:
    return name.split(".")[0] == "kvevict"


def circles(graph: dict) -> list[set]:
    """The sets of nodes, each of two or more, that reach one another. graph: the nodes that each node points to."""

    def reached(start: str) -> set:
        found, waiting = set(), [start]
        while waiting:
            new = graph.get(waiting.pop(), set()) - found
            found |= new
            waiting += new
        return found

    reach = {node: reached(node) for node in graph}
    found: list[set] = []
    for node in graph:
        circle = {other for other in reach[node] if node in reach.get(other, ())}
        if len(circle) > 1 and circle not in found:
            found.append(circle)
    return found
