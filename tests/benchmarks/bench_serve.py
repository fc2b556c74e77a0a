"""Many questions about one text, asked of `kvevict serve` that has stored it and of `transformers serve`, whose prompts
have it every time:

    python tests/benchmarks/bench_serve.py --model DIR --haystack BOOKS [--length 4000] [--budget 1000]

The text and the questions are those of `kvevict eval --tasks many`, asked at /v1/completions. Prints for each server
seconds to the first token of the first and of later questions, right answers, and the growth of the process's peak
memory from after its first small request.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import median

import openai
from bench_read import arguments, resident
from transformers import AutoTokenizer

from kvevict.lab.evaluate.metrics import METRICS
from kvevict.lab.evaluate.tasks import TaskSettings, find

NEW = 24  # tokens of an answer at most


def text_of(args):
    """The cases of one text; each has the text."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    settings = TaskSettings(tokenizer, args.length, 1, 0, TaskSettings.depths, Path(args.haystack), None)
    return list(find("many")(settings))


def client_of(url):
    return openai.OpenAI(base_url=url, api_key="none", timeout=3600, max_retries=0)


@contextlib.contextmanager
def served(side, args):
    """(process, client) of `kvevict serve` or `transformers serve` on a CPU, until the context ends."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    common = [args.model, "--dtype", args.dtype, "--device", "cpu", "--port", str(port)]
    command = [sys.executable, "-m", "kvevict", "serve", *common, "--budget", str(args.budget)]
    if getattr(args, "policy", None):
        command += ["--policy", args.policy]
    if side == "transformers":
        command = [str(Path(sys.executable).parent / "transformers"), "serve", *common]
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    process = subprocess.Popen(command, **quiet, env=os.environ | dict(HF_HUB_OFFLINE="1"))
    threading.Thread(target=process.stderr.read, daemon=True).start()
    try:
        for _ in range(300):
            time.sleep(1)
            if process.poll() is not None:
                raise SystemExit(f"{side} serve ended with {process.returncode}")
            with socket.socket() as asked:
                if asked.connect_ex(("127.0.0.1", port)) == 0:
                    break
        else:
            raise SystemExit(f"{side} serve does not answer")
        yield process, client_of(f"http://127.0.0.1:{port}/v1")
    finally:
        process.terminate()
        process.wait(60)


def asked(client, model, prompt, tokens, **more):
    """(seconds to the first token, the answer) of a stream."""
    start, first, said = time.perf_counter(), None, ""
    options = dict(model=model, prompt=prompt, max_tokens=tokens, temperature=0, stream=True)
    for part in client.completions.create(**options, **more):
        if part.choices and part.choices[0].text:
            first = first or time.perf_counter() - start
            said += part.choices[0].text
    return first, said


def measured(side, args, cases):
    with served(side, args) as (process, client):
        model = args.model if side == "transformers" else Path(args.model).name
        asked(client, model, "The day was", NEW)
        before, start = resident(process=process.pid), time.perf_counter()
        more, stored = {}, 0.0
        if side == "kvevict":
            client.post("/kvevict/texts", body=dict(name="text", text=cases[0].context), cast_to=object)
            more, stored = dict(extra_body=dict(kvevict=dict(text="text"))), time.perf_counter() - start
        seconds, right = [], 0
        for case in cases:
            question = case.question.lstrip("\n") if more else case.context + case.question
            first, said = asked(client, model, question, NEW, **more)
            seconds.append(first or float("nan"))
            right += METRICS[case.metric](said.strip().split("\n")[0], case.answers) == 1
        facts = dict(right=right, questions=len(cases), growth_mib=resident("VmHWM:", process.pid) - before)
        return dict(side=side, first=stored + seconds[0], later=median(seconds[1:]), **facts)


if __name__ == "__main__":
    args = arguments(__doc__, model=..., haystack=..., length=4000, budget="1000", dtype="float32")
    cases = text_of(args)
    for side in ("kvevict", "transformers"):
        got = measured(side, args, cases)
        print(
            f"{side:13} first {got['first']:6.1f} s, later {got['later']:6.2f} s, right {got['right']} of "
            f"{got['questions']}, memory +{got['growth_mib']:.0f} MiB\n{json.dumps(got)}",
            flush=True,
        )
