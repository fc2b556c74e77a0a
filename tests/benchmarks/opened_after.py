"""Questions that nothing opens while the prompt is read: opened_after.py MODEL BOOKS [TEXTS [SHARE [SEED [POLICY]]]].

Of the task `asked/opened` (2,000 tokens, bf16): the prompt ends as its writer left it and is read in chunks of 512 with
a policy (`take+edie`); then the fact's own words open the answer, as decoded tokens would. So small models answer, and
no row that observes has seen those words. A line per place of the question: right answers of those that the full cache
gives, with Wilson's interval, and the right answer's nats a token above the full cache's, where the question that
`kvevict.patch` finds observes, where its exact tokens do, and where the last 32 do."""

import contextlib
import dataclasses
import os
import sys
from collections import defaultdict
from fractions import Fraction
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvevict
from kvevict.analysis.run import Prompt
from kvevict.context import within
from kvevict.evaluate.ask import FULL, Asked, Run, ask, encode, read
from kvevict.evaluate.intervals import of_scores
from kvevict.evaluate.tasks import TASKS, Settings
from kvevict.prompts import ids_of
from kvevict.question import LastTurn


def measured(model, tokenizer, case, run):
    """(full cache's line, {who observes: line}) of a case; {} where the full cache does not answer."""
    bare = case.question.removesuffix(case.opening).removesuffix("\n")
    plain = encode(model, tokenizer, dataclasses.replace(case, question=bare, opening=""))
    prompt = Prompt(plain.context + plain.question, ids_of(tokenizer, case.opening.lstrip()))
    full, lines = ask(model, tokenizer, Asked(case, prompt), FULL), {}
    found = within(question=LastTurn(tokenizer))
    observers = dict(found=found, question=kvevict.observing(plain.said), last=contextlib.nullcontext())
    for name, observing in observers.items():
        if full["score"]:
            with observing:
                text = read(model, tokenizer, Asked(case, prompt), run)
            lines[name] = ask(model, tokenizer, Asked(case, prompt), run, text=text)
    return full, lines


def main(folder, books, texts=6, share="1/16", seed=91, policy="take+edie"):
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    settings = Settings(tokenizer, 2000, int(texts), seed=int(seed), haystack=Path(books))
    run, found, asked, answered = Run(policy, float(Fraction(share)), 512, "agnostic"), defaultdict(list), 0, 0
    for case in TASKS["asked/opened"](settings):
        full, lines = measured(model, tokenizer, dataclasses.replace(case, likelihood=True), run)
        asked, answered = asked + 1, answered + bool(full["score"])
        for name, line in lines.items():
            for place in (case.tags["place"], "all"):
                found[name, place].append((line["score"] > 0, line["nats"] - full["nats"]))
    print(f"the full cache answers {answered} of {asked}")
    for (name, place), each in sorted(found.items()):
        scores, nats = [ok for ok, _ in each], sum(nats for _, nats in each) / len(each)
        _, low, high = of_scores(scores)
        print(f"{name:9} {place:7} {sum(scores):3} of {len(each):3} [{low:.0%}, {high:.0%}]  {nats:+.3f} nats")


if __name__ == "__main__":
    main(*sys.argv[1:])
