"""Every short example runs, uses the public API only, and says what it ought to."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SAYS = {
    "first_steps": "take+edie: The code of Naislet is 364735 (7% of 1787 tokens' slots, 512 KiB)",
    "many_questions": "from disk the same: True",
    "chat": "14% of the slots kept: The code of Naislet is 364735 (right)\nof the file: The code of Quorrin is 558240",
    "own_score": "{'rows': 'probe', 'chunk_size': 128} kept [64, 64, 64, 64]",
    "batch_eval": "4 of 4 right",
    "lookahead_tokens": "[[64, 64, 64, 64]]",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[] if name == "first_steps" else pytest.mark.nightly) for name in SAYS
])  # fmt: skip
def test_runs(name, tmp_path):
    if name == "batch_eval":
        pytest.importorskip("accelerate")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, ROOT / f"examples/{name}.py"], cwd=tmp_path, env=environment, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert SAYS[name] in done.stdout
    assert "wrong" not in done.stdout


@pytest.mark.parametrize("name", SAYS)
def test_public_and_short(name):
    source = (ROOT / f"examples/{name}.py").read_text()
    assert 20 <= len(source.splitlines()) <= 40
    imported = [node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    ours = [alias.name for node in imported for alias in node.names if alias.name.split(".")[0] == "kvevict"]
    ours += [node.module for node in imported if isinstance(node, ast.ImportFrom) and "kvevict" in node.module]
    assert ours == ["kvevict"]
