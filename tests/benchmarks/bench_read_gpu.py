"""Peak memory and time of reading a prompt, and of decoding after it, on a GPU:

    python tests/benchmarks/bench_read_gpu.py [--lengths 8192 32768 131072] [--runs ...]

A random bf16 model of Llama 3.1 8B's shape, in one process, and a batch of --rows; attention is torch's SDPA where it
is unpatched. A run is as bench_read.py has it. Before it is timed, each policy's logits are checked against the
unpatched model's on a short prompt that fits the budget, and reads the shortest of the lengths once. The runs take
turns, and a time is the median of `--rounds`. Memory is what tensors take beyond the model's weights. Prints a table
and one JSON line.
"""

import json
import statistics
import time

import torch
from bench_read import arguments, parse
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import kvevict

RUNS = [f"{p}:budget=512,chunk_size=4096" for p in ("take+edie", "snapkv", "h2o")]
RUNS = ["unpatched", *RUNS, f"{RUNS[0]},compiled=true", f"{RUNS[0]},recall=true"]
FIRST = 5  # tokens that are not timed: they make room, and compiled=True watches and records them


def build(layers, longest):
    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, rope_theta=5e5, max_position_embeddings=longest + 1024, dtype=torch.bfloat16,
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        return LlamaForCausalLM(config).eval()


def patched(model, run):
    name, options = parse(run)
    return model if name == "unpatched" else kvevict.patch(model, name, **options)


def check(model, run, ids):
    """The logits of a prompt of which nothing is evicted. bf16: a unit in the last place is 2^-8; each layer rounds."""
    kvevict.unpatch(model)
    want = model(ids).logits.float()
    got = patched(model, run)(ids).logits.float()
    error = float((got - want).norm() / want.norm())
    if not error < 2**-4:
        raise SystemExit(f"{run}: logits differ by {error:.3g}")
    return error


def measure(model, run, ids, new):
    """(seconds of the read, milliseconds a decoded token, MiB of tensors at the read's peak)."""
    kvevict.unpatch(model)
    patched(model, run)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, start = torch.cuda.memory_allocated(), time.perf_counter()
    cache = DynamicCache(config=model.config)
    token = model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)
    torch.cuda.synchronize()
    read, growth = time.perf_counter() - start, torch.cuda.max_memory_allocated() - before
    for step in range(new + FIRST):
        if step == FIRST:
            torch.cuda.synchronize()
            start = time.perf_counter()
        token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
    torch.cuda.synchronize()
    return read, (time.perf_counter() - start) / new * 1e3, growth / 2**20


def main():
    lengths = [8192, 32768, 131072]
    args = arguments(__doc__, lengths=lengths, runs=RUNS, rounds=3, new_tokens=32, layers=32, rows=1)
    model = build(args.layers, max(args.lengths))
    ids = torch.randint(100000, (args.rows, max(args.lengths)), device="cuda")
    for run in args.runs:
        print(f"{run}: logits differ by {check(model, run, ids[:, :400]):.2g}", flush=True)
        measure(model, run, ids[:, : min(args.lengths)], args.new_tokens)
    results = []
    print(f"{'tokens':>8} {'run':44} {'read s':>8} {'of unpatched':>12} {'token ms':>8} {'growth MiB':>11}")
    for length in args.lengths:
        rounds = [
            [measure(model, run, ids[:, :length], args.new_tokens) for run in args.runs] for _ in range(args.rounds)
        ]
        for i, run in enumerate(args.runs):
            read, token, growth = (statistics.median(each) for each in zip(*(one[i] for one in rounds)))
            results.append(dict(run=run, tokens=length, read_seconds=read, token_ms=token, growth_mib=growth))
            base = next((x["read_seconds"] for x in results if x["run"] == "unpatched" and x["tokens"] == length), None)
            ratio = f"{read / base:12.3f}" if base else f"{'':12}"
            print(f"{length:8} {run:44} {read:8.3f} {ratio} {token:8.2f} {growth:11.1f}", flush=True)
    gpu = torch.cuda.get_device_name()
    print(json.dumps({"bench": "read_gpu", "gpu": gpu, "torch": torch.__version__, "results": results}))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
