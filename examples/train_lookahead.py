"""Train a LookaheadKV adapter for the bundled model on made-up facts, and compare it with other policies.

    python examples/train_lookahead.py [--out DIR] [--steps 600] [--batch 6]

Started again with the same --out, it continues the training. The evaluation asks for names that are in no training pair
(`kvevict.lab.evaluate.tasks.recall`).
"""

import argparse
import random
from itertools import islice
from pathlib import Path

import torch

import kvevict
from kvevict import cli
from kvevict.asking.prompts import ids_of
from kvevict.lab.evaluate import haystack
from kvevict.lab.evaluate.tasks import recall
from kvevict.models.loading import load_model


def pairs(tokenizer, count: int, longest: int, seed: int):
    """Prompts of 100 to `longest` tokens with facts in text or in lines, and their answers. One prompt in four is only
    the context; its response is the question and the answer."""
    rng = random.Random(seed)
    while count > 0:
        made = (lines if rng.random() < 0.35 else hidden)(rng, rng.randint(100, longest))
        context, question, answer = (ids_of(tokenizer, text) for text in made)
        if len(context) + len(question) > longest:
            continue
        count -= 1
        if rng.random() < 0.25:
            yield dict(prompt=context, response=question + answer)
        else:
            yield dict(prompt=context + question, response=answer)


def facts(rng, count: int):
    """(relation, name, value) with names that are not held out."""
    names = set()
    while len(names) < count:
        word = recall.name(rng)
        if not recall.held_out(word):
            names.add(word)
    return [(rng.choice(recall.RELATIONS), who, recall.value(rng)) for who in rng.sample(sorted(names), count)]


def lines(rng, length):
    """Lines "name: value", and a question for one."""
    said = facts(rng, max(4, length // 7))
    _, who, what = rng.choice(said)
    return recall.lines(said), recall.line_question(who), f" {what}\n\nQuestion"


def hidden(rng, length):
    """Facts in other text, and a question for one."""
    said = facts(rng, rng.randint(3, 12))
    sentences = list(islice(haystack.Haystack().sentences(rng), max(1, length // 14)))
    for fact in said:
        sentences.insert(rng.randint(0, len(sentences)), recall.statement(*fact))
    relation, who, what = rng.choice(said)
    return " ".join(sentences), recall.question(relation, who), f" {what}.\n\nQuestion"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="lookahead", help="folder for the adapter, its log and what it scores")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=6)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--targets", default="all", choices=["all", "qv", "none"])
    parser.add_argument("--longest", type=int, default=1000, help="prompt tokens")
    parser.add_argument("--package", help="also write the adapter there in bfloat16, as the package has it")
    args = parser.parse_args()
    folder = kvevict.small_llama()
    model, tokenizer = load_model(folder, "float32", "cpu")
    data = list(pairs(tokenizer, args.steps * args.batch + 24, args.longest, seed=1))
    made = kvevict.lookahead.train(
        model, data, args.out, steps=args.steps, batch=args.batch, lr=args.lr, tokens=args.tokens,
        targets=args.targets, held_out=24, save_every=20, validate_every=100, max_response=48,
    )  # fmt: skip
    if args.package:
        config = kvevict.lookahead.config_of(args.out)
        made.save(args.package, dtype=torch.bfloat16, weights=config["weights"])
    results = Path(args.out) / "results.jsonl"
    results.unlink(missing_ok=True)
    cli.main([
        "eval", "--tasks", "needle", "facts", "keyvalue", "--lengths", "512", "--budgets", "64", "128", "--cases", "8",
        "--mode", "known", "--policies", "snapkv", "laq", "oracle", f"lookahead:adapter={args.out}", "--out",
        str(results),
    ])  # fmt: skip


if __name__ == "__main__":
    main()
