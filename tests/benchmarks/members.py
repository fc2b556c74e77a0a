"""python tests/benchmarks/members.py [FOLDER]: the engine's members that kvevict/policy/ and the quantities use.

One line per object: the name that the code calls it, the number of its members in use, and the members. A chain such as
`slots.kv.first` counts `kv` for `slots` and `first` for `kv`. `x = slots.kv` makes `x` another name of `kv`.
"""

import ast
import sys
from collections import defaultdict
from pathlib import Path

FOLDERS = "kvevict/policy", "kvevict/engine/measure/quantities"
ENGINE = "slots", "kv", "call", "step", "arguments"  # the aim of 15 is for these
INNER = "stored", "heads", "rows", "read", "chunk", "patch", "layer", "module", "decoder", "observation", "part"


class Uses(ast.NodeVisitor):
    """Members by object in one function."""

    def __init__(self, found):
        self.found, self.names = found, {}

    def visit_Assign(self, node):
        self.generic_visit(node)
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts))
            for name, value in pairs:
                known = isinstance(value, ast.Attribute) and value.attr in ENGINE + INNER and self.owner(value.value)
                if known and isinstance(name, ast.Name):
                    self.names[name.id] = value.attr

    def visit_Attribute(self, node):
        self.generic_visit(node)
        owner = self.owner(node.value)
        if owner:
            self.found[owner].add(node.attr)

    def owner(self, node):
        """The engine's object that an expression is, by its name; None: another one."""
        if isinstance(node, ast.Name):
            name = self.names.get(node.id, node.id)
            return name if name in ENGINE + INNER else None
        if isinstance(node, ast.Attribute) and node.attr in ENGINE + INNER and self.owner(node.value):
            return node.attr
        return None


def members(root) -> dict:
    """{object: members} of the files below `root`."""
    found = defaultdict(set)
    for folder in FOLDERS:
        for path in sorted(Path(root, folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef) and {arg.arg for arg in node.args.args} & {*ENGINE, *INNER}:
                    uses = Uses(found)
                    for each in node.body:
                        uses.visit(each)
    return found


def main():
    root = sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[2]
    found = members(root)
    for name in ENGINE + INNER:
        print(f"{name:12} {len(found[name]):3}  {' '.join(sorted(found[name]))}")
    print("of slots, kv, call, step, arguments:", sum(len(found[name]) for name in ENGINE))
    print("with the objects in them:", sum(map(len, found.values())))


if __name__ == "__main__":
    main()
