"""The packages that `import kvevict` and the first use of a name need and import: declared ones only, and none before a
call needs it."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvevict

ROOT = Path(kvevict.__file__).parent
PROJECT = ROOT.parent / "pyproject.toml"

# Runs with these packages hidden: all that are not declared or needed by a declared one, and jinja2 (torch and chat
# templates need it, we do not). Prints the names of imported modules.
BARE = """
import importlib.metadata as metadata, json, sys
from importlib.machinery import PathFinder
from packaging.requirements import Requirement

def needed(names):
    found, left = set(), list(names)
    while left:
        name = left.pop().lower().replace("_", "-")
        if name not in found:
            found.add(name)
            try:
                requires = map(Requirement, metadata.requires(name) or ())
            except metadata.PackageNotFoundError:
                continue
            left += [r.name for r in requires if r.marker is None or r.marker.evaluate({"extra": ""})]
    return found

known = needed(json.loads(sys.argv[1]))
owners = metadata.packages_distributions()
hidden = {top for top, by in owners.items() if not known & {name.lower().replace("_", "-") for name in by}}
hidden = (hidden | {"jinja2", "markupsafe"}) - {"kvevict"}
assert {"pytest", "jinja2"} <= hidden, hidden
for name in [name for name in sys.modules if name.partition(".")[0] in hidden]:
    del sys.modules[name]

class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Hiding
import torch
before = set(sys.modules)
import kvevict
assert set(sys.modules) - before <= {"kvevict", "kvevict.version"}
kvevict.patch
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def declared() -> tuple:
    """Names of the dependencies, and of those with all extras."""
    project = pytest.importorskip("tomllib").loads(PROJECT.read_text())["project"]
    one = lambda each: re.match(r"[\w-]+", each)[0].lower().replace("-", "_")  # noqa: E731
    names = lambda lists: {dict(pyyaml="yaml").get(one(each), one(each)) for each in lists}  # noqa: E731
    own = names(project["dependencies"])
    return own, own | names(each for extra in project["optional-dependencies"].values() for each in extra)


@pytest.fixture(scope="module")
def brought() -> list:
    """Modules that `import kvevict` imports besides torch's, if only the declared packages are installed."""
    command = [sys.executable, "-c", BARE, json.dumps(sorted(declared()[0]))]
    environment = os.environ | {"PYTHONPATH": str(ROOT.parent)}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_import_needs_declared_packages_only(brought):
    assert "kvevict.patch" in brought


def test_import_brings_no_more_than_it_must(brought):
    """The parts of Transformers that a cache's class needs; no model, no compiler; of ours nothing that a command, an
    evaluation, an analysis or a training uses."""
    assert not [name for name in brought if name.partition(".")[0] in ("torch", "sympy", "scipy", "matplotlib")]
    assert "transformers.modeling_utils" not in brought
    apart = ("lab", "commands", "serve", "train.gates", "train.lookahead", "cli", "lm_eval")
    assert not [name for name in brought if name.startswith(tuple(f"kvevict.{part}" for part in apart))]


def imported(file) -> list:
    """(name of the package, whether the import stands at the top) of a file's imports from other packages."""
    tree = ast.parse(file.read_text("utf-8"))
    found = []
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module]
        found += [(name.partition(".")[0], node in tree.body) for name in names]
    return [(name, top) for name, top in found if name not in sys.stdlib_module_names | {"kvevict"}]


def test_every_import_is_declared():
    """At the top only dependencies, elsewhere also packages of an extra. `serve/` has its extra at the top: only
    `kvevict serve` imports it, after it has checked the extra. vLLM imports `vllm/`, and nothing else does."""
    own, extras = declared()
    files = [*ROOT.rglob("*.py")]
    assert len(files) > 200
    for file in files:
        host = {"vllm"} if file.is_relative_to(ROOT / "vllm") else set()
        at_top = extras if file.is_relative_to(ROOT / "serve") else own
        assert not [name for name, top in imported(file) if name not in (at_top if top else extras) | host], file


def test_type_checkers_see_every_public_name():
    """A strict one takes what `kvevict.api` imports for private, unless it says `as`."""
    body = ast.parse((ROOT / "api.py").read_text("utf-8")).body
    names = [a.asname for each in body if isinstance(each, ast.ImportFrom) for a in each.names if a.asname == a.name]
    names += [each.name for each in body if isinstance(each, ast.FunctionDef)]
    assert sorted(names) == sorted(kvevict.__all__)
