"""Optional dependencies: what needs one says how to install it, before a model is loaded; nothing else needs them."""

import subprocess
import sys

import pytest
import transformers.modeling_utils  # noqa: F401  which imports accelerate where that is installed, before it is hidden
from tiny import save

from kvevict.cli import main
from kvevict.models import loading

OPTIONAL = ("scipy", "matplotlib", "accelerate")
ASKED = ["--file", "text.txt"]


@pytest.mark.parametrize("argv", [
    ["eval", "--tasks", "facts", "--policies", "take"], ["eval", "--table-only"], ["diagnose", "who?", *ASKED],
    ["diagnose"],
])  # fmt: skip
def test_the_extra_eval(argv, tmp_path, monkeypatch, capsys):
    refused(argv, ("scipy",), tmp_path, monkeypatch, capsys)
    said = f"kvevict {argv[0]} needs scipy; run: pip install 'kvevict[eval]'"
    assert capsys.readouterr().err == f"kvevict {argv[0]}: {said}\n"


@pytest.mark.parametrize("argv, missing, extra", [
    (["plot", "r.jsonl", "--kind", "budget"], ("matplotlib",), "plot"), (["plot", "r.jsonl"], ("scipy",), "plot"),
    (["train", "--data", "pairs.jsonl", "--out", "out"], ("accelerate",), "train"),
    (["train", "--data", "pairs.jsonl", "--out", "out", "--held-out", "2"], ("scipy",), "train"),
])  # fmt: skip
def test_other_extras(argv, missing, extra, tmp_path, monkeypatch, capsys):
    refused(argv, missing, tmp_path, monkeypatch, capsys)
    assert f"needs {missing[0]}; run: pip install 'kvevict[{extra}]'\n" in capsys.readouterr().err


def refused(argv, missing, tmp_path, monkeypatch, capsys):
    """The command ends with exit code 2 before it loads a model or writes a file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loading, "load_model", lambda *_: pytest.fail("a model was loaded"))
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)
    assert main(argv) == 2
    assert not list(tmp_path.iterdir())


def test_training_without_held_out_pairs_needs_no_scipy(monkeypatch):
    from kvevict.train.lookahead.training import check_installed

    monkeypatch.setitem(sys.modules, "scipy", None)
    check_installed(held_out=0)
    with pytest.raises(ValueError, match=r"training a lookahead adapter needs scipy; run: pip install 'kvevict\[train"):
        check_installed(held_out=1)


WITHOUT = f"""import sys
sys.modules.update(dict.fromkeys({OPTIONAL!r}))
from kvevict.models import loading
from kvevict.cli import main
sys.exit(main(sys.argv[1:]))"""


@pytest.mark.slow
@pytest.mark.parametrize("argv", [
    ["plan", "--tokens", "4096", "--budget", "64"],
    ["generate", "who?", *ASKED, "--budget", "64", "--max-new-tokens", "2", "--compare"],
    ["demo", "--cases", "1", "--policies", "snapkv"],
], ids=lambda argv: argv[0])  # fmt: skip
@pytest.mark.drawn(1)
def test_the_other_commands_run_without(argv, tmp_path):
    model, _ = save(tmp_path / "model")
    (tmp_path / "text.txt").write_text("The code of Naislet is 364735. " * 8)
    more = [] if argv[0] == "demo" else ["--model", model]
    done = subprocess.run([sys.executable, "-c", WITHOUT, *argv, *more], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
