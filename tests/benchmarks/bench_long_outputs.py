"""Long outputs under policies that evict while decoding, beside the full cache:

    python tests/benchmarks/bench_long_outputs.py [--model DIR] [--haystack BOOK] [--policies tri rkv random/redraw ...]

The model reads --prompt tokens of a text (default: generated, as `kvevict eval` has it) and then token by token its
next --tokens. Prints for each policy with --budget slots the *agreement*, the share of these tokens for which the
likeliest next token is the full cache's, and the nats a token above the full cache's, each in quarters of the output.
Then the model writes --tokens tokens by itself, at temperature 0.8 with equal noise for all: prints the *repetition*,
the share of them that end eight tokens that were written before. Means of --texts texts.
"""

from pathlib import Path

import torch
from bench_read import arguments
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvevict
from kvevict.answering.writing import drawn
from kvevict.lab.evaluate.haystack import haystack
from kvevict.lab.evaluate.tasks import TaskSettings
from kvevict.models.compat import CACHE, cache_of

FULL, POLICIES = "full cache", ["tri", "rkv", "random/redraw", "h2o", "tova", "streaming", "snapkv:decode=true"]
SPAN = 8  # tokens of a repeated span
TEMPERATURE = 0.8


def steps(model, ids, more, choose):
    """Logits before each of `more` tokens, of which choose(number, logits) is the next."""
    out = model(ids, use_cache=True, logits_to_keep=1)
    cache, found, written = cache_of(out), [], []
    for number in range(more):
        found.append(out.logits[0, -1].float())
        written.append(choose(number, found[-1]))
        out = model(torch.tensor([[written[-1]]]), **{CACHE: cache}, use_cache=True)
    return torch.stack(found), written


def repetition(ids):
    seen, again = set(), 0
    for end in range(SPAN, len(ids) + 1):
        span = tuple(ids[end - SPAN : end])
        again += span in seen
        seen.add(span)
    return again / max(1, len(ids) - SPAN + 1)


def measured(model, ids, prompt, tokens, text):
    """(logits along the text [tokens, vocabulary], repetition of the model's own output)."""
    following = ids[0, prompt : prompt + tokens].tolist()
    logits, _ = steps(model, ids[:, :prompt], tokens, lambda number, row: following[number])
    noise = torch.Generator().manual_seed(text)
    _, own = steps(model, ids[:, :prompt], tokens, lambda number, row: int(drawn(row, noise, TEMPERATURE)))
    return logits, repetition(own)


@torch.no_grad()
def main():
    args = arguments(
        __doc__, model="", haystack="", policies=POLICIES, budget=128, prompt=256, tokens=1600, texts=2, dtype="float32"
    )
    folder = args.model or kvevict.small_llama()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, args.dtype)).eval()
    tokenizer, found = AutoTokenizer.from_pretrained(folder), {}
    length = args.prompt + args.tokens
    settings = TaskSettings(tokenizer, length, args.texts, haystack=Path(args.haystack) if args.haystack else None)
    for text in range(args.texts):
        passage = haystack(settings).passage(settings.rng("long", text), length + 64, settings)
        ids = tokenizer(passage, return_tensors="pt").input_ids[:, :length]
        assert ids.shape[1] == length
        full, again = measured(model, ids, args.prompt, args.tokens, text)
        right = full.log_softmax(1).gather(1, ids[0, args.prompt :, None])
        found.setdefault(FULL, []).append((torch.ones(4), -right.view(4, -1).mean(1), again))
        for name in args.policies:
            with kvevict.evicting(model, name, budget=args.budget, tokenizer=tokenizer):
                logits, again = measured(model, ids, args.prompt, args.tokens, text)
            same = (logits.argmax(1) == full.argmax(1)).float().view(4, -1).mean(1)
            above = (right - logits.log_softmax(1).gather(1, ids[0, args.prompt :, None])).view(4, -1).mean(1)
            found.setdefault(name, []).append((same, above, again))
    print(f"{'':20} agreement by quarter, mean        nats above by quarter, mean        repetition")
    for name, rows in found.items():
        same, above = (torch.stack([row[at] for row in rows]).mean(0) for at in (0, 1))
        quarters = [" ".join(f"{each:6.3f}" for each in (*part.tolist(), part.mean())) for part in (same, above)]
        print(f"{name:20} {quarters[0]}  {quarters[1]}  {sum(row[2] for row in rows) / len(rows):.3f}", flush=True)


if __name__ == "__main__":
    main()
