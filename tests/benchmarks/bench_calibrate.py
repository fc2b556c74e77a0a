"""python bench_calibrate.py MODEL XQUAD.json OUT.jsonl [--prompts 200 --held-out 100 --policy take+edie --budgets 256]:
what `kvevict.calibrate` promises, beside the agreement on prompts that it did not see.

A prompt is a question of XQuAD after some paragraphs of its article, in the model's chat template. Prompts are drawn
without replacement; the first are calibrated on, the next are held out. A row for each promise: the budget found (a
larger one than the longest prompt keeps all), the prompts that differed, the promised share of equal answers, and the
held-out prompts whose answers were equal, with Wilson's 95 % interval. OUT.jsonl has each answer once: the same call
goes on after an interruption, and calls with other policies, budgets or promises share the full cache's answers.
"""

import json
import random
from pathlib import Path

import torch
from bench_read import arguments

import kvevict
from kvevict.lab.evaluate.intervals import of_scores
from kvevict.models.loading import load_model

LEAST = 0.01  # agreement asked of held-out prompts, so low that all of them are counted


def questions(path, paragraphs):
    """Prompts of all questions about the first `paragraphs` of each article."""
    for article in json.loads(Path(path).read_text())["data"]:
        parts = article["paragraphs"][:paragraphs]
        text = "\n\n".join(part["context"] for part in parts)
        yield from (f"{text}\n\nAnswer in a few words: {asked['question']}" for part in parts for asked in part["qas"])


@torch.no_grad()
def main():
    args = arguments(
        __doc__, "model", "data", "out", prompts=200, held_out=100, paragraphs=3, policy="take+edie",
        budgets=[1024, 512, 256, 128], agree=[0.9, 0.95], new_tokens=12, dtype="bfloat16", seed=1,
    )  # fmt: skip
    model, tokenizer = load_model(args.model, args.dtype, "cpu")
    drawn = list(dict.fromkeys(questions(args.data, args.paragraphs)))
    random.Random(args.seed).shuffle(drawn)
    given, rest = drawn[: args.prompts], drawn[args.prompts : args.prompts + args.held_out]
    assert len(rest) == args.held_out, f"{len(drawn)} questions"
    lengths = sorted(len(tokenizer(each)["input_ids"]) for each in given + rest)
    print(f"{args.policy}: {len(given)} prompts of {lengths[0]} to {lengths[-1]} tokens, {len(rest)} held out")

    def calibrated(prompts, agree, budgets):
        return kvevict.calibrate(
            model, tokenizer, prompts, agree=agree, policies=[args.policy], budgets=budgets,
            max_new_tokens=args.new_tokens, file=args.out,
        )  # fmt: skip

    for agree in args.agree:
        result = calibrated(given, agree, args.budgets)
        told = " ".join(f"{each.budget}:{each.differing}{'' if each.agreed else '+'}" for each in result.tried)
        if result.found is None:
            print(f"| {agree} | none can be promised | {told} | | |", flush=True)
            continue
        (held,) = calibrated(rest, LEAST, [result.found.budget]).tried
        equal = len(rest) - held.differing
        _, low, high = of_scores([True] * equal + [False] * held.differing)
        print(
            f"| {agree} | {result.found.budget} | {told} | {result.found.agreed:.3f} "
            f"| {equal} of {len(rest)} [{low:.0%}, {high:.0%}] |", flush=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()
