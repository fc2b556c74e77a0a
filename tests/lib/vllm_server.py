"""Starts vLLM's own server on this machine's CPU."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request


@contextlib.contextmanager
def serving(model, folder, *options, kvevict=None, longest=256):
    """The address of a server of a model's folder, named "m". kvevict: its options; None: plain vLLM."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", "m"]
    command += ["--port", str(port), "--max-num-seqs", "4", "--max-model-len", str(longest), "--dtype", "float32"]
    command += ["--kv-cache-memory-bytes", str(64 << 20), *options]
    if kvevict is not None:
        command += ["--additional-config", json.dumps(dict(kvevict=kvevict))]
    environment = os.environ | dict(
        VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1"
    )
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        for _ in range(300):
            assert process.poll() is None, (folder / "log").read_text()[-6000:]
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health").close()
                break
            time.sleep(1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)
