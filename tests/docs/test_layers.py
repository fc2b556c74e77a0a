"""A module of the package imports, at its top or in a function, only from its layer and those below; a module of
engine/ only from its room and those below. Files import one another in no circle but those that are named here."""

import ast
from pathlib import Path

import pytest
from imports import circles, imported

PACKAGE = Path(__file__).parents[2] / "kvevict"
LAYERS = (  # files and rooms; of several that fit a file the longest counts
    "_C version context cautions ops models store/files store/sealed train/processes "
    "asking/prompts asking/sentences asking/tokens asking/turns",
    "policy models/adapter models/experts",
    "engine",
    "patch report models/trial models/refusals asking store answering train/targets train/query_statistics",
    "train",
    "commands serve lm_eval vllm",
    "lab",  # nothing but `cli` imports from here
    "cli",
    "api __init__ __main__",
)
ROOMS = ("memory", "measure", "cut", "read record methods", "watch", "hook")  # of engine/; cut.py is a room
CIRCLES = {  # files that import one another, by one of them: the list may only shrink
    "policy/policy": 3,
}
MOST_ANY = 634  # names `Any` in the package
MOST_MODULES = 10  # at the top level
FILES = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names.split()}
FLOOR = {name: floor for floor, names in enumerate(ROOMS) for name in names.split()}


def text_of(file: Path) -> str:
    return (PACKAGE / file).read_text("utf-8")


def module(path: tuple) -> str:
    """The file or room that a name of the package, as `imported` gives it, is imported from."""
    for end in range(len(path), 1, -1):
        name = "/".join(path[1:end])
        if (PACKAGE / f"{name}.py").is_file() or (PACKAGE / name / "__init__.py").is_file():
            return name
    return "_C" if path[1:2] == ("_C",) else "__init__"


def name_of(file: Path) -> str:
    return file.with_suffix("").as_posix().removesuffix("/__init__")


def layer(name: str) -> int:
    """The level of a file or room."""
    parts = name.split("/")
    return next(LEVEL[each] for end in range(len(parts), 0, -1) if (each := "/".join(parts[:end])) in LEVEL)


def upward(file: Path, text: str) -> set:
    """The modules of higher layers that a file imports."""
    own = layer(name_of(file))
    return {name for name in map(module, imported(file, text)) if layer(name) > own}


def room_of(file: Path) -> str:
    """The room of a file of the engine."""
    return file.parts[1].removesuffix(".py")


def upstairs(file: Path, text: str) -> set:
    """The higher rooms of the engine that a file of the engine imports."""
    rooms = {path[2] for path in imported(file, text) if path[1:2] == ("engine",) and path[2:] and path[2] in FLOOR}
    return {room for room in rooms if FLOOR[room] > FLOOR[room_of(file)]}


def test_every_module_has_a_layer():
    assert all(layer(name_of(file)) is not None for file in FILES)
    assert len([file for file in FILES if len(file.parts) == 1]) <= MOST_MODULES


@pytest.mark.quick
def test_no_import_runs_upwards():
    assert len(FILES) > 100
    assert not {(file.as_posix(), name) for file in FILES for name in upward(file, text_of(file))}


def test_only_cli_imports_the_laboratory():
    outside = [file for file in FILES if file.parts[0] != "lab"]
    found = {
        file.as_posix() for file in outside if any(path[1:2] == ("lab",) for path in imported(file, text_of(file)))
    }
    assert found == {"cli.py"}


def test_the_engine_s_rooms():
    files = [file for file in FILES if file.parts[0] == "engine" and file.parts[1] != "__init__.py"]
    assert set(map(room_of, files)) == FLOOR.keys()
    assert not {(file.as_posix(), room) for file in files for room in upstairs(file, text_of(file))}
    above = "from ..read import step\nfrom ..watch.watcher import Watcher"
    assert upstairs(Path("engine/measure/rope.py"), above) == {"read", "watch"}


def test_no_further_circle():
    """The package itself and its public names, which import lazily, are left out."""
    graph = {name_of(file): set(map(module, imported(file, text_of(file)))) - {"__init__"} for file in FILES}
    assert graph["patch"] and "engine/read/spans" in graph["engine/hook/forward"]
    found = circles(graph)
    assert {name: len(circle) for name in CIRCLES for circle in found if name in circle} == CIRCLES
    assert len(found) == len(CIRCLES)
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [{"b", "c"}]


@pytest.mark.parametrize("file, text, found", [
    ("engine/read/layer.py", "from ...lab.analysis import diagnose", {"lab/analysis"}),
    ("engine/read/layer.py", "def f():\n    from ...lab.analysis.page import write", {"lab/analysis/page"}),
    ("policy/rows/probe.py", "from ...train.lookahead.passes import loss", {"train/lookahead/passes"}),
    ("policy/rows/probe.py", "from ... import patch\nfrom ...models import families, trial", {"patch", "models/trial"}),
    ("policy/policy.py", "import kvevict.lab.evaluate.ask", {"lab/evaluate/ask"}),
    ("policy/policy.py", "from kvevict.commands import grid", {"commands"}),
    ("policy/policy.py", "from kvevict import lab", {"lab"}),
    ("policy/policy.py", "if TYPE_CHECKING:\n    from ..patch import Patch", {"patch"}),
    ("policy/policy.py", "from kvevict import PRESETS", {"__init__"}),
    ("store/files.py", "from .. import policy", {"policy"}),
    ("policy/policy.py", "from . import presets\nfrom ..ops import _ops\nfrom ..store.files import replacing", set()),
    ("lab/commands/eval.py", "from . import room\nfrom ..evaluate import run\nfrom ...commands import command", set()),
])  # fmt: skip
def test_what_counts(file, text, found):
    assert upward(Path(file), text) == found


def assigning(text: str, name: str) -> bool:
    """Whether a file assigns an attribute `name` of an object."""
    nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute))
    return any(node.attr == name and isinstance(node.ctx, ast.Store) for node in nodes)


def test_only_a_layer_changes_which_slots_it_has():
    assert [name_of(file) for file in FILES if assigning(text_of(file), "storage")] == ["engine/memory/layer"]
    assert assigning("layer.storage, x = 1, 2", "storage") and not assigning("x = layer.storage", "storage")


def test_any_is_not_used_more_often():
    """mypy asks for the types of every function; `Any` says nothing. The number may only fall."""
    nodes = (node for file in FILES for node in ast.walk(ast.parse(text_of(file))))
    assert sum(isinstance(node, ast.Name) and node.id == "Any" for node in nodes) <= MOST_ANY
