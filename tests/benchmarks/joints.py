"""How the package hangs together, in numbers, of the tree that this file is in or of another:

    python tests/benchmarks/joints.py [TREE] [--names]

The members of what the engine hands to policy/ that policy/ uses, the methods of the classes that most goes through,
ContextVars, imports that run upwards, and lines. `--names` lists them. Prints a table and one JSON line.
"""

import argparse
import ast
import json
import sys
from pathlib import Path

HANDED = {  # classes that policy/ gets objects of, and what it calls those
    "View": ("view",), "Slots": ("slots",), "Observation": ("observation", "observed"), "Heads": ("heads",),
    "LayerRows": ("call",), "Step": ("step",), "Request": ("request",), "Read": ("read",),
}  # fmt: skip
COUNTED = "Request", "EvictionLayer"
sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))
from test_layers import LEVEL  # noqa: E402

FILES = "kvevict/engine", "kvevict/policy", "kvevict/_ops.py", "csrc/binding.cpp"


def classes(trees) -> dict:
    """Name -> definition of every class of HANDED and COUNTED in engine/."""
    engine = (tree for path, tree in trees.items() if path.parts[1] == "engine")
    nodes = (node for tree in engine for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return {node.name: node for node in nodes if node.name in (*HANDED, *COUNTED)}


def members(node) -> set:
    """What a class defines in its body or assigns to itself."""
    found = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
    for each in node.body:
        targets = each.targets if isinstance(each, ast.Assign) else [getattr(each, "target", None)]
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
    own = (each for each in ast.walk(node) if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store))
    return found | {each.attr for each in own if isinstance(each.value, ast.Name) and each.value.id == "self"}


def used(trees, known: dict) -> dict:
    """Class -> names of its members that policy/ uses, asking for them by the names of HANDED."""
    found = {name: set() for name in HANDED if name in known}
    for path, tree in trees.items():
        for node in ast.walk(tree) if path.parts[1] == "policy" else ():
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                for name in found:
                    if node.value.id in HANDED[name] and node.attr in members(known[name]):
                        found[name].add(node.attr)
    return {name: sorted(names) for name, names in found.items()}


def imported(path, node) -> list:
    """The modules of kvevict that a statement imports: their first name below the package."""
    if isinstance(node, ast.Import):
        parts = [alias.name.split(".") for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        here = path.with_suffix("").parts[: -node.level] if node.level else ()
        base = [*here, *(node.module or "").split(".")] if node.module else [*here]
        parts = [[*base, alias.name] for alias in node.names]
    else:
        return []
    return [each[1] for each in parts if each[0] == "kvevict" and len(each) > 1]


def upwards(trees) -> list:
    """'importing file -> module' of imports from a higher layer, also those inside functions."""
    found = set()
    for path, tree in trees.items():
        own = LEVEL.get(path.with_suffix("").parts[1])  # None: the package's own __init__
        for node in ast.walk(tree) if own is not None else ():
            found |= {f"{path} -> {name}" for name in imported(path, node) if LEVEL.get(name, -1) > own}
    return sorted(found)


def lines(path) -> int:
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    return sum(len(file.read_text().splitlines()) for file in files)


def measure(root) -> dict:
    files = sorted((root / "kvevict").rglob("*.py"))
    trees = {file.relative_to(root): ast.parse(file.read_text()) for file in files}
    unknown = {path.with_suffix("").parts[1] for path in trees} - LEVEL.keys() - {"__init__"}
    if unknown:
        raise SystemExit(f"LAYERS in tests/docs/test_layers.py does not say where {', '.join(sorted(unknown))} belongs")
    known, table = classes(trees), {}
    for name, names in used(trees, known).items():
        table[f"members of {name} used by policy/"] = names
    for name in COUNTED:
        methods = [each.name for each in known[name].body if isinstance(each, ast.FunctionDef)]
        table[f"methods of {name}"] = methods
    calls = ((path, node) for path, tree in trees.items() for node in ast.walk(tree) if isinstance(node, ast.Call))
    table["ContextVars"] = [f"{path}:{node.lineno}" for path, node in calls if ast.unparse(node.func) == "ContextVar"]
    table["upward imports"] = upwards(trees)
    return table | {f"lines of {name}": lines(root / name) for name in FILES if (root / name).exists()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", nargs="?", type=Path, default=Path(__file__).parents[2])
    parser.add_argument("--names", action="store_true", help="list what is counted")
    args = parser.parse_args()
    table = measure(args.tree)
    counts = {name: found if isinstance(found, int) else len(found) for name, found in table.items()}
    for name, count in counts.items():
        print(f"{name:40}{count:6}")
        if args.names and not isinstance(table[name], int):
            print("    " + "\n    ".join(table[name]))
    print(json.dumps({"joints": counts}))


if __name__ == "__main__":
    main()
