"""Seconds of answering questions about one text that was read before, one at a time and in batches:

    python tests/benchmarks/bench_questions.py MODEL [--batches 1 8] [--questions 20] [--tokens 3000] [--runs 2]

MODEL is a folder. Batches of each size are asked in turn, `--runs` times, of one cache. Prints the median of each size,
its share of the first one's, and how many answers are the first one's.
"""

import argparse
import statistics
import time

import kvevict
from kvevict.models import load_model
from kvevict.prompts import ids_of

THINGS = ("lantern", "barley", "harbour", "kettle", "orchard", "ferry", "mill", "anchor", "ledger", "bell")
ASKED = ("Where is the {}?", "Who looked after the {} in the end, and why?", "Say in a few words what the {} is like.")

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("model")
parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
parser.add_argument("--questions", type=int, default=20)
parser.add_argument("--tokens", type=int, default=3000)
parser.add_argument("--budget", type=int, default=512)
parser.add_argument("--max-new-tokens", type=int, default=32)
parser.add_argument("--runs", type=int, default=2)
parser.add_argument("--dtype", default="bfloat16")
args = parser.parse_args()

model, tokenizer = load_model(args.model, args.dtype, "cpu")
line = "Year {}: the {} was moved to house {}, and Agnes wrote its number down."
lines = (line.format(1700 + n, THINGS[n % len(THINGS)], n * 37 % 101) for n in range(args.tokens))
text = next(lines)
while len(ids_of(tokenizer, text)) < args.tokens:
    text += f" {next(lines)}"
asked = [ASKED[n % len(ASKED)].format(THINGS[n % len(THINGS)]) for n in range(args.questions)]
cache = kvevict.read(model, tokenizer, text, "snapkv", budget=args.budget)

seconds: dict = {size: [] for size in args.batches}
answers = {}
for _ in range(args.runs):
    for size in args.batches:
        start = time.perf_counter()
        answers[size] = kvevict.answer(
            model, tokenizer, cache, asked, batch_size=size, max_new_tokens=args.max_new_tokens
        )
        seconds[size].append(time.perf_counter() - start)
medians = {size: statistics.median(taken) for size, taken in seconds.items()}
first = args.batches[0]
for size, taken in medians.items():
    same = sum(a == b for a, b in zip(answers[size], answers[first], strict=True))
    print(f"batch {size}: {taken:.1f} s, {taken / medians[first]:.2f} of the first; {same} of {len(asked)} the same")
