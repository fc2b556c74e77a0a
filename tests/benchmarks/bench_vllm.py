"""python bench_vllm.py MODEL [--budget 512] [--policy take+edie]: plain vLLM and kvevict in it, one after the other, on
a CPU with one thread, in the same script. Prints bytes of a request, requests that fit, and processor seconds."""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
os.environ |= dict(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="WARNING",
)  # fmt: skip


def measure(a):
    from vllm import LLM, SamplingParams

    options = None if a.engine == "plain" else dict(budget=a.budget, period=a.period, policy=a.policy, kv=a.kv)
    llm = LLM(
        model=a.model, dtype=a.dtype, max_model_len=a.longest, max_num_batched_tokens=a.period, max_num_seqs=16,
        kv_cache_memory_bytes=a.memory << 20, enforce_eager=True, seed=0, enable_prefix_caching=False,
        additional_config={} if options is None else dict(kvevict=options),
        **(dict(
            scheduler_cls="kvevict.vllm.scheduler.create", logits_processors=["kvevict.vllm.copies:RequestCopies"]
        ) if options and a.questions else {}),
    )  # fmt: skip
    config = llm.llm_engine.vllm_config.cache_config
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    caches = [layer.kv_cache for layer in worker.model_runner.compilation_config.static_forward_context.values()]
    block = sum(cache.nbytes for cache in caches) / config.num_gpu_blocks
    blocks = -(-a.longest // config.block_size)
    text = "\n".join(page.read_text("utf-8") for page in sorted((ROOT / "docs").glob("*.md")))
    ids = llm.get_tokenizer().encode(text, add_special_tokens=False)

    def text_from(begin, length):
        return [ids[at % len(ids)] for at in range(begin, begin + length)]

    def run(prompts, new):
        """Processor seconds until every request has its first token, and from then on until all have the last."""
        engine, waiting, clock = llm.llm_engine, set(map(str, range(len(prompts)))), [time.process_time()]
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        for i, each in enumerate(prompts):
            engine.add_request(str(i), dict(prompt_token_ids=each), params)
        while engine.has_unfinished_requests():
            begun = {output.request_id for output in engine.step() if output.outputs[0].token_ids}
            if waiting and not (waiting := waiting - begun):
                clock.append(time.process_time())
        return clock[1] - clock[0], time.process_time() - clock[1]

    run([ids[:1200]], 2)  # warm
    prefill, answer = run([ids[: a.tokens]], 1 + a.new)
    token = answer / a.new
    several = sum(run([text_from(i * a.several, a.several) for i in range(a.requests)], a.answer))
    print("RESULT", json.dumps(dict(
        request_bytes=block * blocks, fit=(config.num_gpu_blocks - 1) // blocks, prefill=prefill, token=token,
        several=several,
    )))  # fmt: skip


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("model")
    p.add_argument("--budget", type=int, default=512)
    p.add_argument("--period", type=int, default=512)
    p.add_argument("--policy", default="take+edie")
    p.add_argument("--kv", default="model", help="how kvevict stores slots")
    p.add_argument("--dtype", default="bfloat16")
    p.add_argument("--longest", type=int, default=8192, help="max_model_len")
    p.add_argument("--memory", type=int, default=2048, help="MiB for KV")
    p.add_argument("--tokens", type=int, default=7500, help="of the prompt")
    p.add_argument("--new", type=int, default=64, help="tokens decoded after it")
    p.add_argument("--requests", type=int, default=8)
    p.add_argument("--several", type=int, default=3800, help="tokens of each of several prompts at once")
    p.add_argument("--answer", type=int, default=16, help="tokens of each of their answers")
    p.add_argument("--questions", action="store_true", help="copy a question into kvevict's prompts: their last rows")
    p.add_argument("--engine", choices=["plain", "kvevict"], help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.engine:
        return measure(a)
    found = []
    for engine in ("plain", "kvevict"):
        command = [sys.executable, __file__, *sys.argv[1:], "--engine", engine]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr[-4000:])
        line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
        found.append(json.loads(line.removeprefix("RESULT")))
    plain, mine = found
    rows = dict(
        request_bytes=("MB of a request", 1e-6), fit=("requests that fit", 1), prefill=("prompt, processor s", 1),
        token=("a token after it, processor ms", 1e3), several=(f"{a.requests} prompts of {a.several}, processor s", 1),
    )  # fmt: skip
    for name, (title, factor) in rows.items():
        ratio = mine[name] / plain[name]
        print(f"{title:38} {plain[name] * factor:9.1f} {mine[name] * factor:9.1f} {ratio:7.2f}")


if __name__ == "__main__":
    main()
