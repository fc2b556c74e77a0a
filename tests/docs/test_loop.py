"""The loop's own parts: a red test that is run again, marks of slow tests, the tests that a change touches."""

import os
import re
import shutil
import subprocess
import sys

import durations
import pytest
import touched

FLAKY = """from pathlib import Path
import pytest

def test_green():
    pass

def test_once():
    seen = Path(__file__).with_name("seen")
    first = not seen.exists()
    seen.touch()
    assert not first

@pytest.mark.parametrize("case", range({reds}))
def test_red(case):
    assert False
"""


def gate(folder, reds):
    """Exit codes of pytest and of again.py in a project with a test that is red once, and tests that stay red."""
    (folder / ".ci").mkdir()
    for name in ("again.py", "flaky.txt"):
        shutil.copy(touched.ROOT / ".ci" / name, folder / ".ci")
    (folder / "test_flaky.py").write_text(FLAKY.format(reds=reds))
    pytest_ = subprocess.run([sys.executable, "-m", "pytest", "-q", "-n0", "."], cwd=folder, capture_output=True)
    again = [sys.executable, ".ci/again.py", str(pytest_.returncode), folder / "report"]
    return pytest_.returncode, subprocess.run(again, cwd=folder, capture_output=True).returncode


def test_a_red_test_is_run_again_alone(tmp_path):
    assert gate(tmp_path, reds=0) == (1, 0)
    report = "red, then green alone: test_flaky.py::test_once (not yet in .ci/flaky.txt: add it)\n"
    assert (tmp_path / "report").read_text() == report


def test_what_stays_red_is_red(tmp_path):
    """The report has the line that repeats it."""
    assert gate(tmp_path, reds=1) == (1, 1)
    assert "python -m pytest -n0 'test_flaky.py::test_red[0]'\n" in (tmp_path / "report").read_text()


def test_many_red_tests_are_not_run_again(tmp_path):
    assert gate(tmp_path, reds=10) == (1, 1)  # eleven with test_once
    assert (tmp_path / "report").read_text().count("red: ") == 11


def test_a_long_list_of_flaky_tests_is_red(tmp_path):
    (tmp_path / ".ci").mkdir()
    shutil.copy(touched.ROOT / ".ci/again.py", tmp_path / ".ci")
    for count, code in ((10, 0), (11, 1)):
        lines = [f"tests/test_x.py::test_{i}: a race\n" for i in range(count)]
        (tmp_path / ".ci/flaky.txt").write_text("# a comment\n" + "".join(lines))
        assert subprocess.run([sys.executable, tmp_path / ".ci/again.py", "--check"]).returncode == code


@pytest.mark.parametrize("code, found", [
    ("import pytest\n@pytest.mark.slow\ndef test_a(): pass\ndef test_b(): pass", {"test_b"}),
    ("import pytest\npytestmark = [pytest.mark.slow]\ndef test_a(): pass\ndef test_b(): pass", set()),
    ("def test_a(): pass", {"test_a"}),
])  # fmt: skip
def test_marks_of_slow_tests(code, found, tmp_path):
    (tmp_path / "test_x.py").write_text(code)
    assert durations.unmarked(tmp_path / "test_x.py") == found


def test_slow_tests_have_the_mark():
    table = durations.read()
    assert any(longest > durations.SLOW for _, _, longest in table.values()) and durations.main() == 0


def test_durations_are_kept(tmp_path, monkeypatch):
    """A function that is not run keeps its line; one that takes less than half a second has none."""
    monkeypatch.setattr(durations, "TABLE", tmp_path / "table")
    test = "tests/docs/test_loop.py::test_"
    durations.write(durations.TABLE, {f"{test}a[1]": 2.0, f"{test}a[2]": 3.0, f"{test}b": 0.1, "tests/gone.py::c": 9.0})
    assert durations.read() == {f"{test}a": (2, 5.0, 3.0)}
    durations.write(durations.TABLE, {f"{test}d": 1.0})
    assert durations.read() == {f"{test}a": (2, 5.0, 3.0), f"{test}d": (1, 1.0, 1.0)}


@pytest.mark.parametrize("path, nearest", [
    ("csrc/attend_cpu.c", "tests/ops/test_attend.py"), ("csrc/simd.h", "tests/ops/test_score.py"),
    ("README.md", "tests/docs/test_pages.py"),
    ("kvevict/policy/scores/later.py", "tests/policies/test_gates.py"),
    ("kvevict/store/saving.py", "tests/hf/test_store.py"), ("tests/lib/oracle.py", "tests/policies/test_policies.py"),
    ("tests/hf/test_fork.py", "tests/hf/test_fork.py"),
])  # fmt: skip
def test_what_a_change_touches(path, nearest, monkeypatch):
    monkeypatch.setattr(touched, "SECONDS", 10**6)
    monkeypatch.setattr(touched, "changed", lambda: [path])
    touched.nearest.cache_clear()
    try:
        assert nearest in touched.nearest()
        assert touched.chosen_of([f"{nearest}::test_x", "tests/docs/nothing.py::test_y"]) == {f"{nearest}::test_x"}
    finally:
        touched.nearest.cache_clear()


LOST = {  # what ends a worker, or keeps it from its end
    "exits": "os._exit(3)", "killed": "os.kill(os.getpid(), signal.SIGKILL)", "hangs": "time.sleep(1000)",
    "stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
    "leaves_its_pipe": "os.fork() and os.kill(os.getpid(), signal.SIGKILL) or time.sleep(40)",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("ways", [("killed",), pytest.param([*LOST], marks=pytest.mark.nightly)])
def test_a_lost_worker(ways, tmp_path):
    """Its test fails by name; every other test is run, once, and pytest ends."""
    (tmp_path / "conftest.py").write_text(
        "import workers, xdist.workermanage\nworkers.GRACE = 10\nxdist.workermanage.NodeManager.EXIT_TIMEOUT = 1\n"
        "pytest_plugins = ['workers']"
    )
    for way in ways:
        tests = ["def test_before(): pass", f"def test_{way}(): {LOST[way]}", "def test_after(): pass"]
        (tmp_path / f"test_{way}.py").write_text("\n".join(["import os, signal, time", *tests]))
    (tmp_path / "test_green.py").write_text("def test_green(): pass")
    limits = ["--timeout", "3", "--timeout-method", "thread"]
    options = ["-q", "-n2", "--dist", "loadfile", *limits, "-p", "no:cacheprovider"]
    with (tmp_path / "output").open("w+") as output:  # not a pipe, whose end a fork keeps
        env = os.environ | dict(PYTHONPATH=str(touched.ROOT / "tests/lib"))
        done = subprocess.run([sys.executable, "-m", "pytest", *options, tmp_path], stdout=output, env=env, timeout=300)
        output.seek(0)
        said = output.read()
    assert done.returncode == 1 and f"{len(ways)} failed, {2 * len(ways) + 1} passed" in said
    for way in ways:
        assert re.search(rf"worker 'gw\d' crashed while running '.*test_{way}.py::test_{way}'", said)


def test_no_test_module_imports_another():
    """What two need is in tests/lib. test_wide.py runs tests of others again."""

    def imports(file):
        return re.search(rf"^(from|import) test_(?!{file.stem[5:]}\b)", file.read_text(encoding="utf-8"), re.M)

    assert {file.name for file in touched.ROOT.glob("tests/*/test_*.py") if imports(file)} == {"test_wide.py"}
