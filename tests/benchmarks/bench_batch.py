"""The largest batch whose prompts are read within some memory, by `kvevict plan`'s count and measured (EDIE, table 5):

    python tests/benchmarks/bench_batch.py [--tokens 2048] [--limit 512] [--runs ...]

The random model of bench_read.py; the limit is of what reading the prompts and decoding 8 tokens add to the process, in
MiB. Every trial is a fresh process, and the largest batch is found by doubling, then halving what is between. Prints a
table and one JSON line.
"""

import argparse
import json
import subprocess
import sys

import torch
from bench_read import build, parse

from kvevict.analysis import cost
from kvevict.analysis.run import measure
from kvevict.analysis.shape import shape_of
from kvevict.policy import policy

OPTIONS = ":budget=256,chunk_size=512"
RUNS = ["unpatched", "edie+tada:budget=256", *(name + OPTIONS for name in ("edie+tada/chunked", "take", "take+edie"))]


def policy_of(run):
    """None: unpatched."""
    name, options = parse(run)
    return None if name == "unpatched" else policy.build(name, **options)


def growth(run, tokens, batch) -> float:
    """MiB, of this process."""
    ids = torch.randint(1000, (batch, tokens), generator=torch.Generator().manual_seed(1))
    return measure(build(tokens), None, ids, policy_of(run), max_new_tokens=8)["peak_bytes"] / 2**20


def planned(run, shape, tokens, batch) -> float:
    """MiB of keys, values and activations."""
    found = cost.plan(shape, policy_of(run), tokens, batch=batch)
    return (found["peak_bytes"] - found["weight_bytes"]) / 2**20


def measured(run, tokens, batch) -> float:
    call = [sys.executable, __file__, "--tokens", str(tokens), "--one", run, str(batch)]
    done = subprocess.run(call, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{run} with {batch} prompts failed:\n{done.stderr}")
    return float(done.stdout.split()[-1])


def largest(fits) -> int:
    """The largest number that fits, where all below it do; above 16 within a sixteenth."""
    high = 1
    while fits(high):
        high *= 2
    low = high // 2
    while high - low > max(1, high // 16):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--limit", type=float, default=512, help="MiB")
    parser.add_argument("--runs", nargs="+", default=RUNS, help="as of bench_read.py")
    parser.add_argument("--one", nargs=2, metavar=("RUN", "BATCH"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(growth(args.one[0], args.tokens, int(args.one[1])))
        return
    shape, results = shape_of(build(args.tokens).config, "float32"), []
    print(f"{args.tokens} tokens, {args.limit:g} MiB\n{'':44} planned  measured")
    for run in args.runs:
        plan = largest(lambda batch, run=run: planned(run, shape, args.tokens, batch) <= args.limit)
        found = largest(lambda batch, run=run: measured(run, args.tokens, batch) <= args.limit)
        results.append(dict(run=run, planned=plan, measured=found))
        print(f"{run:44} {plan:7} {found:9}", flush=True)
    print(json.dumps({"bench": "batch", "tokens": args.tokens, "limit": args.limit, "results": results}))


if __name__ == "__main__":
    main()
