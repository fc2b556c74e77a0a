"""Versions of Transformers: too old is an error, newer than the tested ones a warning."""

import ast
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import kvevict
from kvevict.models import compat

ROOT = Path(kvevict.__file__).parent
NEWER = f"{compat.TESTED[1][0]}.{compat.TESTED[1][1] + 1}"


@pytest.mark.quick
def test_the_range_is_the_declared_one():
    """The declared lowest versions and the range in README are `TESTED`; a newer version can be installed."""
    declared = pytest.importorskip("tomllib").loads((ROOT.parent / "pyproject.toml").read_text())["project"]
    (needed,) = (each for each in declared["dependencies"] if each.startswith("transformers"))
    assert re.match(r"transformers>=([\d.]+)", needed)[1] == compat.OLDEST
    assert f"Transformers {compat.OLDEST} to {compat.NEWEST}" in (ROOT.parent / "README.md").read_text()


@pytest.mark.quick
def test_versions():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for version in (compat.OLDEST, f"{compat.OLDEST}.1", f"{compat.NEWEST}.7", f"{compat.NEWEST}.0.dev0"):
            assert compat.checked(version) in {(5, 4), compat.TESTED[1]}
    for old in ("4.57.1", "5.3.9"):
        with pytest.raises(ImportError, match=f"needs transformers {compat.OLDEST} or newer, found {old}; run: pip"):
            compat.checked(old)
    for new in (f"{NEWER}.0", f"{NEWER}.0.dev0", "6.0"):
        said = f"tested with transformers {compat.OLDEST} to {compat.NEWEST}, found {new}"
        with pytest.warns(UserWarning, match=said):
            compat.checked(new)


@pytest.mark.parametrize("version, code", [(f"{NEWER}.0", 0), ("5.3.0", 1)])
def test_another_version_is_installed(version, code, tmp_path):
    """A newer one warns once, and then all goes on; an older one stops the first use."""
    (tmp_path / f"transformers-{version}.dist-info").mkdir()
    (tmp_path / f"transformers-{version}.dist-info/METADATA").write_text(
        f"Metadata-Version: 2.1\nName: transformers\nVersion: {version}\n"
    )
    source = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT.parent)!r}]; import kvevict; "
    source += "print(len(kvevict.policies())); kvevict.patch, kvevict.read"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    if code:
        assert f"ImportError: kvevict needs transformers {compat.OLDEST} or newer, found {version}" in done.stderr
    else:
        assert done.stdout.split() == [str(len(kvevict.policies()))]
        assert done.stderr.count(f"tested with transformers {compat.OLDEST} to {compat.NEWEST}, found {version}") == 1


def private(text: str) -> list:
    """Names with an underscore that a file imports from Transformers, modules' paths included."""
    found = []
    for node in ast.walk(ast.parse(text)):
        names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        if isinstance(node, ast.ImportFrom):
            names = [] if node.level else [f"{node.module}.{name}" for name in names]
        found += [name for name in names if name.split(".")[0] == "transformers" and "._" in name]
    return found


@pytest.mark.quick
def test_nothing_private_is_imported():
    files = list(ROOT.rglob("*.py"))
    assert len(files) > 100
    assert [(file.name, name) for file in files for name in private(file.read_text("utf-8"))] == []


@pytest.mark.parametrize("text, found", [
    ("from transformers.a import b, _c", ["transformers.a._c"]), ("import transformers._a", ["transformers._a"]),
    ("def f():\n    from transformers._a import b", ["transformers._a.b"]),
    ("from transformers import a\nfrom .transformers import _b\nfrom torch import _C", []),
])  # fmt: skip
def test_what_is_private(text, found):
    assert private(text) == found


def test_stand_ins_are_of_methods_that_there_are():
    """And a model without such a method is patched all the same."""
    from transformers import LlamaForCausalLM

    assert all(hasattr(LlamaForCausalLM, name) for name in compat.STAND_INS)
