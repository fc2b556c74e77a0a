"""Time to the first token, time per token and memory of the papers' policies on a GPU, in 8 minutes:

    python tests/benchmarks/bench_papers_gpu.py [--minutes 8] [--lengths 4096 ... 131072] [--batches 1 2 4 ...]
    python tests/benchmarks/bench_papers_gpu.py --device cpu --layers 4 --hidden 64 --lengths 256 512 --batches 1 2

The model is random, in bf16, of Llama 3.1 8B's shape or smaller, and so are its lookahead rows. Each policy reads and
decodes once at each length, after a run at the shortest one that is not shown. Then prompts of the shortest length are
read in ever larger batches until the memory is full (EDIE's table 5). What the minutes leave no time for is named.
Prints a table and one JSON line.
"""

import json
import time

import torch
from bench_read import arguments
from transformers import LlamaConfig, LlamaForCausalLM

from kvevict.lab.analysis.run import measure
from kvevict.lab.analysis.speed import held
from kvevict.models.adapter import Adapter
from kvevict.policy.building import choose

NAMES = ("take", "snapkv", "adakv", "fastkv", "cake", "edie", "edie+tada", "chunkkv", "chunkkv/reuse", "laq",
         "lookahead")  # fmt: skip
BATCHED = ("unpatched", "edie+tada")


def build(device, layers, hidden, longest):
    heads = max(8, hidden // 128)
    config = LlamaConfig(
        vocab_size=128256 if hidden == 4096 else 1000, hidden_size=hidden, intermediate_size=hidden * 7 // 2,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads // 4, rope_theta=5e5,
        max_position_embeddings=longest + 1024, dtype=torch.bfloat16,
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)  # else the weights are made in fp32 first
    with torch.device(device):
        model = LlamaForCausalLM(config).eval()
        adapter = Adapter(model)
    torch.set_default_dtype(torch.float32)
    model.generation_config.eos_token_id = None  # all runs decode as many tokens
    return model, adapter


def policies(budget, chunk, adapter):
    """{name: policy}; `take` reads in chunks, all others in one pass."""
    own = {"chunkkv/reuse": dict(n_reuse=2), "lookahead": dict(adapter=adapter), "take": dict(chunk_size=chunk)}
    made = {name: choose(name.partition("/")[0], budget=budget, **own.get(name, {})) for name in NAMES}
    return {"unpatched": None} | made


def timed(model, chosen, ids, new):
    run = measure(model, None, ids, chosen, new)
    step = run["decode_seconds"] / (new - 1)
    kept = held(run, {})[1] if chosen else None
    return dict(first_token_s=run["read_seconds"], ms_per_token=1000 * step, new_tokens_per_s=len(ids) / step,
                peak_mib=run["peak_bytes"] / 2**20, kv_mib=kept and kept / 2**20)  # fmt: skip


def main():
    args = arguments(
        __doc__, device="cuda", layers=32, hidden=4096, budget=512, chunk=4096, new_tokens=16, minutes=8.0,
        lengths=[4096, 8192, 16384, 32768, 65536, 131072], batches=[1, 2, 4, 8, 16, 32, 64, 128],
    )  # fmt: skip
    start, results, left_out = time.perf_counter(), [], []
    lengths = sorted(args.lengths)
    model, adapter = build(args.device, args.layers, args.hidden, lengths[-1])
    chosen = policies(args.budget, args.chunk, adapter)
    ids = torch.randint(1000, (max(args.batches), lengths[-1]), device=args.device)
    last = {}  # seconds of a policy's last run, by which the next one is foreseen

    def run(name, batch, tokens, factor):
        spent = time.perf_counter() - start
        label = f"{name} {batch} x {tokens}"
        if spent + factor * last.get(name, 0.0) > 60 * args.minutes:
            left_out.append(label)
            return False
        try:
            row = timed(model, chosen[name], ids[:batch, :tokens], args.new_tokens)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            left_out.append(f"{label}: out of memory")
            return False
        last[name] = time.perf_counter() - start - spent
        results.append(dict(policy=name, batch=batch, tokens=tokens) | row)
        print(f"{label:32}" + "".join(f"{'' if x is None else format(x, '.4g'):>18}" for x in row.values()), flush=True)
        return True

    for name in chosen:
        timed(model, chosen[name], ids[:1, : lengths[0]], args.new_tokens)
    print(f"{'policy, batch x tokens':32}" + "".join(
        f"{text:>18}" for text in ("first token s", "ms a token", "new tokens/s", "peak MiB", "KV MiB")))  # fmt: skip
    for before, tokens in zip([lengths[0], *lengths], lengths, strict=False):
        for name in chosen:
            run(name, 1, tokens, (tokens / before) ** 2)
    for name in BATCHED:
        for batch in sorted(args.batches):
            if not run(name, batch, lengths[0], 2):
                break
    print("Left out: " + ("; ".join(left_out) or "nothing"))
    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    told = {"bench": "papers_gpu", "device": device, "torch": torch.__version__, "results": results}
    print(json.dumps(told | {"left_out": left_out, "seconds": time.perf_counter() - start}))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
