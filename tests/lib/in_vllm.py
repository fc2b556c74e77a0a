"""vLLM on this machine's CPU, in processes of its own: offline, and as a server."""

import atexit
import contextlib
import functools
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import tiny
import torch
import zoo

import kvevict

CHILD = Path(__file__).parents[1] / "vllm" / "child.py"
FOUND = importlib.util.find_spec("vllm")  # without vLLM it may be tests/vllm, which has no file of its own
needed = pytest.mark.skipif(FOUND is None or not FOUND.origin, reason="vLLM is missing: .ci/run vllm has it")
QUESTIONS = dict(scheduler_cls="kvevict.vllm.scheduler.create", logits_processors=["kvevict.vllm.copies:RequestCopies"])


def prompts(lengths, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 250, (n,), generator=generator).tolist() for n in lengths]


def save(folder, type):
    """A tiny random model of a type, with a token per byte; returns the folder's name."""
    zoo.make(type, dict(zoo.types())[type]).save_pretrained(folder)
    tiny.byte_tokenizer().save_pretrained(folder)
    return str(folder)


@functools.cache
def child():
    """child.py, which imports vLLM once for all jobs."""
    started = subprocess.Popen([sys.executable, CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(started.communicate)  # at its input's end it ends
    return started


def vllm(folder, models, runs, options=None, longest=256, **llm):
    """The results of child.py: of each model those of each run. options: kvevict's; None: plain vLLM."""
    job, result, log = files = [folder / name for name in ("job.json", "result.json", "log")]
    more = {} if options is None else dict(additional_config=dict(kvevict=options))
    job.write_text(json.dumps(dict(models=models, runs=runs, llm=dict(max_model_len=longest) | llm | more)))
    print(json.dumps([str(file) for file in files]), file=child().stdin, flush=True)
    code = child().stdout.readline().strip()
    assert code == "0", f"{code}\n{log.read_text()[-8000:]}"
    return json.loads(result.read_text())


@torch.no_grad()
def by_engine(model, ids, prompt, period, **chosen):
    """The Transformers engine on vLLM's schedule (METHODS 14): it reads the whole periods of a text's first `prompt`
    tokens and then token by token. Returns the logits [T, V] and the cache."""
    begin = max(prompt // period * period, 1)
    with kvevict.evicting(model, chunk_size=period, decode=True, interval=period, **chosen):
        out = model(torch.tensor([ids[:begin]]), use_cache=True)
        logits = [out.logits[0]]
        for token in ids[begin:]:
            out = model(torch.tensor([[token]]), past_key_values=out.past_key_values)
            logits.append(out.logits[0])
    return torch.cat(logits), out.past_key_values


@contextlib.contextmanager
def serving(model, folder, *options, kvevict=None, longest=256):
    """The address of a server of a model's folder, named "m". kvevict: its options; None: plain vLLM."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", "m"]
    command += ["--port", str(port), "--max-num-seqs", "4", "--max-model-len", str(longest), "--dtype", "float32"]
    command += ["--kv-cache-memory-bytes", str(64 << 20), "--enforce-eager", *options]  # compiling takes a minute
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
