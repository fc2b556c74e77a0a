"""A module of the package imports, at its top or in a function, only from its layer and those below; a module of
engine/ only from its room and those below."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from imports import imported

PACKAGE = Path(__file__).parents[2] / "kvevict"
LAYERS = (
    "_C _native _ops cautions context version compat families files known models processes products progress prompts "
    "rotary sealed sentences tokens turns weights",
    "policy",
    "engine",
    "batch trial patch question refusals report store writing answer query_statistics repeated",
    "lookahead gates",
    "commands serve lm_eval",
    "lab",  # nothing but `cli` imports from here
    "cli",
    "api __init__ __main__",
)
ROOMS = ("slots", "measure", "read", "watch", "hook")  # of engine/
MOST_ANY = 1433  # names `Any` in the package
FILES = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names.split()}


def modules(file: Path, text: str) -> set:
    """The top-level modules that a file imports."""
    return {path[1] if path[1:] and path[1] in LEVEL else "__init__" for path in imported(file, text)}


def upward(file: Path, text: str) -> set:
    """Those of higher layers."""
    return {name for name in modules(file, text) if LEVEL[name] > LEVEL[file.with_suffix("").parts[0]]}


def upstairs(file: Path, text: str) -> set:
    """The higher rooms of the engine that a file of the engine imports."""
    level = {name: level for level, names in enumerate(ROOMS) for name in names.split()}
    rooms = {path[2] for path in imported(file, text) if path[1:2] == ("engine",) and path[2:] and path[2] in level}
    return {room for room in rooms - {file.parts[1]} if level[room] >= level[file.parts[1]]}


def test_every_module_has_a_layer():
    found = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert found <= LEVEL.keys()


@pytest.mark.quick
def test_no_import_runs_upwards():
    assert len(FILES) > 100
    found = {(file.as_posix(), name) for file in FILES for name in upward(file, (PACKAGE / file).read_text("utf-8"))}
    assert not found


def test_only_cli_imports_the_laboratory():
    outside = [file for file in FILES if file.parts[0] != "lab"]
    found = {file.as_posix() for file in outside if "lab" in modules(file, (PACKAGE / file).read_text("utf-8"))}
    assert found == {"cli.py"}


def test_the_engine_s_rooms():
    files = [file for file in FILES if file.parts[0] == "engine" and len(file.parts) > 2]
    assert {file.parts[1] for file in files} == {name for names in ROOMS for name in names.split()}
    found = {(file.as_posix(), room) for file in files for room in upstairs(file, (PACKAGE / file).read_text("utf-8"))}
    assert not found
    assert upstairs(Path("engine/measure/rope.py"), "from ..read import step\nfrom ..watch.watcher import Watcher") == {
        "read",
        "watch",
    }


def rooms(file: Path, text: str) -> set:
    """The modules and folders of the package that a file imports from; of the engine its rooms."""
    names = {path[1:] for path in imported(file, text)}
    return {"/".join(name[: 1 + (name[0] == "engine")]) for name in names if name and name[0] in LEVEL}


def test_no_circle():
    """The package itself and its public names, which import lazily, are left out."""
    graph: dict = {}
    for file in FILES:
        parts = file.with_suffix("").parts
        room = "/".join(parts[: 1 + (parts[0] == "engine")])
        graph.setdefault(room, set()).update(rooms(file, (PACKAGE / file).read_text("utf-8")) - {room})
    assert graph["patch"] and graph["engine/read"]
    list(TopologicalSorter(graph).static_order())  # or a CycleError


@pytest.mark.parametrize("file, text, found", [
    ("engine/read/evict.py", "from ...lab.analysis import diagnose", {"lab"}),
    ("engine/read/evict.py", "def f():\n    from ...lab.analysis.diagnose import note", {"lab"}),
    ("policy/rows/probe.py", "from ...lookahead.adapter import Adapter", {"lookahead"}),
    ("policy/rows/probe.py", "from ... import patch, families", {"patch"}),
    ("policy/policy.py", "import kvevict.lab.evaluate.ask", {"lab"}),
    ("policy/policy.py", "from kvevict.commands import grid", {"commands"}),
    ("policy/policy.py", "from kvevict import lab", {"lab"}),
    ("policy/policy.py", "if TYPE_CHECKING:\n    from ..patch import Patch", {"patch"}),
    ("policy/policy.py", "from kvevict import PRESETS", {"__init__"}),
    ("files.py", "from . import policy", {"policy"}),
    ("policy/policy.py", "from . import presets\nfrom .. import _ops\nfrom ..files import replacing", set()),
    ("lab/commands/eval.py", "from . import room\nfrom ..evaluate import run\nfrom ...commands import command", set()),
])  # fmt: skip
def test_what_counts(file, text, found):
    assert upward(Path(file), text) == found


def test_any_is_not_used_more_often():
    """mypy asks for the types of every function; `Any` says nothing. The number may only fall."""
    texts = ((PACKAGE / file).read_text("utf-8") for file in FILES)
    nodes = (node for text in texts for node in ast.walk(ast.parse(text)))
    assert sum(isinstance(node, ast.Name) and node.id == "Any" for node in nodes) <= MOST_ANY
