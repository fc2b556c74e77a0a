"""Tokens per second of sequences that decode one after the other, and of the same ones that decode together:

    python tests/benchmarks/bench_batch.py MODEL [--rows 1 8] [--prompt 200] [--tokens 64] [--runs 3] [--dtype float32]

MODEL is a folder. Prompts differ in length and content. All numbers of rows are timed in turn, `--runs` times, after a
first run that checks the tokens: rows that differ from the same sequence alone are counted. Prints medians.
"""

import argparse
import statistics
import time

import torch

import kvevict
from kvevict.batch import Batch, Pools
from kvevict.compat import cache_of
from kvevict.families import find_decoder
from kvevict.models import load_model

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("model")
parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
parser.add_argument("--prompt", type=int, default=200)
parser.add_argument("--tokens", type=int, default=64)
parser.add_argument("--policy", default="take+edie")
parser.add_argument("--budget", type=int, default=128)
parser.add_argument("--runs", type=int, default=3)
parser.add_argument("--dtype", default="float32")
args = parser.parse_args()

model, _ = load_model(args.model, args.dtype, "cpu")
noise, sequences = torch.Generator().manual_seed(1), max(args.rows)
lengths = [args.prompt - n % 7 for n in range(sequences)]
prompts = [torch.randint(100, model.config.vocab_size, (1, n), generator=noise) for n in lengths]
slots = find_decoder(model).config.num_key_value_heads * (args.budget + args.tokens + 128)


def read(pools, prompt):
    out = model(prompt, past_key_values=pools.cache(), logits_to_keep=1, use_cache=True)
    return cache_of(out), int(out.logits[0, -1].argmax())


@torch.no_grad()
def run(rows):
    """Seconds of decoding alone, and every sequence's tokens."""
    seconds, written = 0.0, {}
    for start in range(0, sequences, rows):
        pools, batch, tokens = Pools(find_decoder(model), 2 * rows * slots), Batch(model), {}
        for row in range(start, min(start + rows, sequences)):
            cache, first = read(pools, prompts[row])
            batch.add(row, cache)
            tokens[row] = [first]
        began = time.perf_counter()
        for _ in range(args.tokens):
            for row, logits in zip(batch.rows, batch.step([tokens[row][-1] for row in batch.rows]), strict=True):
                tokens[row].append(int(logits.argmax()))
        seconds += time.perf_counter() - began
        written |= tokens
    return seconds, written


with kvevict.evicting(model, args.policy, budget=args.budget):
    alone = run(1)[1]
    seconds: dict = {rows: [] for rows in args.rows}
    others = {rows: sum(run(rows)[1][row] != alone[row] for row in alone) for rows in args.rows}
    for _ in range(args.runs):
        for rows in args.rows:
            seconds[rows].append(run(rows)[0])
speeds = {rows: sequences * args.tokens / statistics.median(taken) for rows, taken in seconds.items()}
for rows, speed in speeds.items():
    ratio, differ = speed / speeds[args.rows[0]], others[rows]
    print(f"{rows} together: {speed:.1f} tokens/s, {ratio:.2f} times; {differ} of {sequences} differ from those alone")
