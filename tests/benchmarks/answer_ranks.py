"""How high each layer ranks the tokens of the answer's sentence in the chunk that holds it, by the policy's pooled
scores summed over kv heads: answer_ranks.py MODEL BOOKS [QUESTIONS]. Of the task `many`, the question known, in chunks
of 512 at 1/16 of the slots. A line per layer: the share of questions whose worst-ranked token is among the 64 and 128
best, of the layer's own scores and of their sum over the layers up to it."""

import itertools
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvevict
from kvevict.context import within
from kvevict.engine.watch import Watcher
from kvevict.evaluate import ask
from kvevict.evaluate.tasks import TASKS, Settings

BEFORE = 16  # tokens of the sentence before the answer's first


class Worth(Watcher):
    """[(layer, position of the chunk's first token, worth [S] of its tokens)] of one read."""

    def __init__(self):
        self.found = []

    def read(self, call, score):
        if score is not None:
            slots, new = call.slots, call.slots.kv.k.shape[2]
            pooled = call.policy.score.pooled(slots, score).masked_fill(~slots.competing, torch.inf)
            worth = sum(row[n - new : n] for row, n in zip(pooled[0], slots.n[0].tolist(), strict=True))
            self.found.append((slots.index, int(slots.pos[0, 0]), worth))


def worst(worth, wanted) -> int:
    """The rank, from 1, of the lowest-ranked wanted column."""
    return int(worth.argsort(descending=True, stable=True).argsort()[wanted].max()) + 1


def ranks(model, tokenizer, case):
    """[layer] (rank by its own worth, rank by the sum up to it), or None where no text has the answer."""
    prompt = ask.encode(model, tokenizer, case)
    pieces = [tokenizer.decode(token) for token in prompt.context]
    ends, answer = itertools.accumulate(map(len, pieces)), case.answers[0]
    said = f"{case.opening.removeprefix('Answer: ')} {answer}"
    at = "".join(pieces).find(said)
    if at < 0:
        return None
    stop = at + len(said)
    inside = [i for i, end in enumerate(ends) if stop - len(answer) < end <= stop]
    ids, watcher = torch.tensor([prompt.context + prompt.question]), Worth()
    options = dict(budget=1 / 16, chunk_size=512, tokenizer=tokenizer)
    with kvevict.evicting(model, "take+edie", **options), within(watchers=(watcher,)), torch.no_grad():
        model(ids, use_cache=True, logits_to_keep=1)
    found = [(start, worth) for _, start, worth in watcher.found if start <= inside[0] < start + len(worth)]
    start = found[0][0]
    wanted = [i - start for i in range(max(start, inside[0] - BEFORE), inside[-1] + 1) if i - start < len(found[0][1])]
    sums = itertools.accumulate(worth for _, worth in found)
    return [(worst(worth, wanted), worst(total, wanted)) for (_, worth), total in zip(found, sums)]


def main(folder, books, questions=19):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    cases = TASKS["many"](Settings(tokenizer, 2000, 5, seed=0, haystack=Path(books)))
    each = filter(None, (ranks(model, tokenizer, case) for case in cases))
    table = torch.tensor(list(itertools.islice(each, int(questions)))).double()  # [questions, layers, 2]
    print("layer  own: 64  128   sum: 64  128")
    for layer in range(table.shape[1]):
        own, total = ([(table[:, layer, i] <= most).double().mean() for most in (64, 128)] for i in (0, 1))
        print(f"{layer:5}     {own[0]:.2f} {own[1]:.2f}       {total[0]:.2f} {total[1]:.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
