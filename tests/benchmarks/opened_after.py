"""Questions that nothing opens while the prompt is read:

    opened_after.py MODEL BOOKS [TEXTS [SHARE [SEED [POLICY [KINDS [OBSERVERS]]]]]]

Of the task `asked/opened` (2,000 tokens, bf16): the prompt ends as its writer left it and is read in chunks of 512 with
a policy (`take+edie`); then the fact's own words open the answer, as decoded tokens would. So small models answer, and
no row that observes has seen those words. A line per place of the question and per kind of fact: right answers of those
that the full cache gives, with Wilson's interval, the right answer's nats a token above the full cache's, and the share
of heads that hold all of the answer's tokens in the text, where the answer is right and where it is wrong. OBSERVERS:
`found`, the question that `kvevict.patch` finds; `question`, its exact tokens; `last`, the last 32. KINDS and OBSERVERS
are joined by commas, and all by default."""

import contextlib
import dataclasses
import os
import sys
from collections import defaultdict
from fractions import Fraction
from pathlib import Path
from statistics import fmean

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvevict
from kvevict.compat import cache_of
from kvevict.context import within
from kvevict.lab.analysis.run import Prompt
from kvevict.lab.evaluate.ask import FULL, Asked, Run, ask, encode, read
from kvevict.lab.evaluate.intervals import of_scores
from kvevict.lab.evaluate.tasks import TASKS, Settings
from kvevict.prompts import ids_of
from kvevict.question import LastTurn, find


def held(tokenizer, ids: list, case, cache) -> float:
    """The share of heads whose slots hold all tokens of the answer in the text."""
    said = f"{case.opening.partition('Answer:')[2] or case.opening} {case.answers[0]}"
    start, stop = find(tokenizer, ids, said)
    start += find(tokenizer, ids[start:stop], case.answers[0])[0]
    layers = [layer.storage for layer in cache.layers if hasattr(layer, "storage")]
    heads = [set(at.tolist()) for storage in layers for row in storage.positions() for at in row]
    return fmean(set(range(start, stop)) <= at for at in heads)


def measured(model, tokenizer, case, run, names):
    """(full cache's line, {who observes: line}) of a case; {} where the full cache does not answer."""
    bare = case.question.removesuffix(case.opening).removesuffix("\n")
    plain = encode(model, tokenizer, dataclasses.replace(case, question=bare, opening=""))
    prompt = Prompt(plain.context + plain.question, ids_of(tokenizer, case.opening.lstrip()))
    full, lines = ask(model, tokenizer, Asked(case, prompt), FULL), {}
    found = within(question=LastTurn(tokenizer))
    observers = dict(found=found, question=kvevict.observing(plain.said), last=contextlib.nullcontext())
    for name in names:
        if full["score"]:
            with observers[name]:
                text = read(model, tokenizer, Asked(case, prompt), run)
            lines[name] = ask(model, tokenizer, Asked(case, prompt), run, text=text)
            lines[name]["held"] = held(tokenizer, prompt.context, case, cache_of(text.out))
    return full, lines


def main(folder, books, texts=6, share="1/16", seed=91, policy="take+edie", kinds="", names="found,question,last"):
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    settings = Settings(tokenizer, 2000, int(texts), seed=int(seed), haystack=Path(books))
    run, found, asked, answered = Run(policy, float(Fraction(share)), 512, "agnostic"), defaultdict(list), 0, 0
    for case in TASKS["asked/opened"](settings):
        if kinds and case.tags["kind"] not in kinds.split(","):
            continue
        full, lines = measured(model, tokenizer, dataclasses.replace(case, likelihood=True), run, names.split(","))
        asked, answered = asked + 1, answered + bool(full["score"])
        for name, line in lines.items():
            for place in (case.tags["place"], case.tags["kind"], "all"):
                found[name, place].append((line["score"] > 0, line["nats"] - full["nats"], line["held"]))
    print(f"the full cache answers {answered} of {asked}")
    for (name, place), each in sorted(found.items()):
        scores, nats, heads = zip(*each)
        _, low, high = of_scores(scores)
        where = {right: [at for ok, at in zip(scores, heads) if ok == right] for right in (True, False)}
        print(f"{name:9} {place:8} {sum(scores):3} of {len(each):3} [{low:.0%}, {high:.0%}]  {fmean(nats):+.3f} nats",
              *(f"{['wrong', 'right'][right]}: {fmean(at):.0%} of heads" for right, at in where.items() if at),
              sep="  ")  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
