"""examples/serve_ray.py answers as a lone server does. Needs `ray[serve]`."""

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from serving import Client, cached

pytest.importorskip("ray.serve", reason="ray[serve] is not installed", exc_type=ImportError)
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "serve_ray.py"


def test_two_replicas(tmp_path):
    """Each question goes to any of them, and is answered from what one of them has read."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    own = dict(HOME=str(tmp_path), PYTHONPATH=str(ROOT), RAY_USAGE_STATS_ENABLED="0", HF_HUB_OFFLINE="1")
    command = [sys.executable, EXAMPLE, str(port), str(tmp_path / "texts")]
    done = subprocess.run(command, env=os.environ | own, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]

    spec = importlib.util.spec_from_file_location("serve_ray", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    from kvevict.serve.start import server_of

    alone, lines = Client(server_of(budget=256)), []
    for name, text in example.TEXTS.items():
        assert alone.store(name, text).status_code == 200
        for key, code in example.FACTS[name].items():
            prompt = f"Question: What is the code of {key}?\nAnswer:"
            answer = alone.post("/v1/completions", prompt=prompt, max_tokens=12, kvevict=dict(text=name))
            said = answer.json()["choices"][0]["text"]
            assert str(code) in said and cached(answer) > 300
            lines.append(f"{name}: {said!r}, {cached(answer)} tokens cached")
    assert done.stdout.splitlines() == lines * 2  # asked twice
    assert len(list((tmp_path / "texts" / "prefixes").glob("*.safetensors"))) == len(example.TEXTS)
