"""Prompts of `kvevict eval`'s tasks as pairs for `kvevict train`, in a model's own tokens and chat template:

    python tests/benchmarks/lookahead_pairs.py --model M --haystack TEXT --out pairs.jsonl [--tasks facts keyvalue]

Seeds count from 1000: an evaluation with other seeds asks for other facts; give it another haystack, too.
"""

import argparse
import itertools
import json
import random

from kvevict.lab.evaluate.ask import encode
from kvevict.lab.evaluate.tasks import Settings, find
from kvevict.models import load_model


def pairs(model, tokenizer, args, first=1000):
    for seed in itertools.count(first):
        for length in args.lengths:
            for name in args.tasks:
                for case in find(name)(Settings(tokenizer, length, 1, seed, haystack=args.haystack)):
                    yield dict(prompt=(made := encode(model, tokenizer, case)).context + made.question)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--haystack")
    parser.add_argument("--tasks", nargs="+", default=["facts", "keyvalue", "fidelity"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 1024])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--out", default="pairs.jsonl")
    args = parser.parse_args()
    model, tokenizer = load_model(args.model, "auto", "cpu")
    made = list(itertools.islice(pairs(model, tokenizer, args), args.count))
    random.Random(0).shuffle(made)
    with open(args.out, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(pair) + "\n" for pair in made)
    print(f"{len(made)} prompts of {sum(len(pair['prompt']) for pair in made) / len(made):.0f} tokens on average")


if __name__ == "__main__":
    main()
