"""One machine's seconds and memory before a change and after it:

    python tests/benchmarks/bench_checkouts.py BEFORE AFTER [--runs ...] [--length 4096] [--new-tokens 300] [--rounds 5]

BEFORE and AFTER are folders of two checkouts with their extension built. The runs are bench_read.py's, each a fresh
process, which checks its logits before it is timed; the checkouts take turns. Prints the medians of AFTER, and their
ratios to those of BEFORE: of reading, of the median decoded token, of the peak memory's growth in a read and of the
cache's peak.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from bench_read import build, measure, parse

RUNS = [f"{p}:budget=512,chunk_size=1024" for p in ("take+edie", "snapkv", "h2o", "streaming")]
MEASURED = dict(read_seconds="read s", token_ms="token ms", growth_mib="growth MiB", peak_cache_bytes="peak KV bytes")


@torch.no_grad()
def token_ms(run: str, length: int, new: int) -> float:
    """The median of `new` decoded tokens after a read of `length` tokens, the first tenth left out."""
    import kvevict

    model, (name, options) = build(length), parse(run)
    kvevict.patch(model, name, **options)
    ids = torch.randint(1000, (1, length), generator=torch.Generator().manual_seed(1))
    cache, taken = model(ids, use_cache=True, logits_to_keep=1).past_key_values, []
    for token in range(new):
        start = time.perf_counter()
        model(torch.tensor([[token % 1000]]), past_key_values=cache, use_cache=True)
        taken.append(time.perf_counter() - start)
    return 1000 * statistics.median(taken[new // 10 :])


def one(folder, run, args) -> dict:
    call = [sys.executable, __file__, "", "", "--one", "--runs", run, "--length", str(args.length)]
    environment = os.environ | dict(PYTHONPATH=str(Path(folder).resolve()))
    done = subprocess.run(
        [*call, "--new-tokens", str(args.new_tokens)], capture_output=True, text=True, env=environment
    )
    if done.returncode:
        sys.exit(f"{run} of {folder} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--runs", nargs="+", default=RUNS)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--new-tokens", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        (run,) = args.runs
        print(json.dumps(measure(run, args.length, 0) | dict(token_ms=token_ms(run, args.length, args.new_tokens))))
        return
    for run in args.runs:
        found: dict = {folder: [] for folder in (args.before, args.after)}
        for number in range(args.rounds):
            for folder in list(found)[:: 1 if number % 2 else -1]:
                found[folder].append(one(folder, run, args))
        print(f"{run:40}", end="")
        for name, title in MEASURED.items():
            before, after = (statistics.median(each[name] for each in found[f]) for f in (args.before, args.after))
            print(f"  {title} {after:.3f} ({after / before:.3f})", end="")
        print(flush=True)


if __name__ == "__main__":
    main()
