"""Long outputs under policies that evict while decoding, beside the full cache:

    python tests/benchmarks/bench_long_outputs.py OUT.jsonl [--model DIR] [--haystack BOOK] [--policies tri rkv ...]

The model reads --prompt tokens of a text (default: generated, as `kvevict eval` has it) and then token by token its
next --tokens. *agreement* is the share of these tokens for which the likeliest next token is the full cache's, *nats*
those a token above the full cache's. In the same batch the model writes --tokens tokens of its own after the prompt, at
temperature 0.8 with equal noise for all policies: *repetition* is the share of them that end eight tokens that were
written before. Writes a line per text and policy with --budget slots, skips policies that OUT has with this budget, and
prints means with 95 % intervals over the --texts texts.
"""

import collections
import json
from pathlib import Path

import torch
from bench_read import arguments
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvevict
from kvevict.answering.writing import drawn
from kvevict.lab.evaluate.haystack import haystack
from kvevict.lab.evaluate.intervals import student
from kvevict.lab.evaluate.tasks import TaskSettings
from kvevict.models.compat import CACHE, cache_of

FULL, POLICIES = "full cache", ["tri", "rkv", "random/redraw", "h2o", "tova", "streaming", "snapkv:decode=true"]
SPAN = 8  # tokens of a repeated span
TEMPERATURE = 0.8


def repetition(ids):
    seen, again = set(), 0
    for end in range(SPAN, len(ids) + 1):
        span = tuple(ids[end - SPAN : end])
        again += span in seen
        seen.add(span)
    return again / max(1, len(ids) - SPAN + 1)


def measured(model, ids, prompt):
    """([texts, tokens] likeliest tokens along the texts, nats of the texts' own tokens, repetition of what the model
    writes) of ids [texts, prompt + tokens]."""
    texts, (likeliest, nats, own) = len(ids), ([], [], [])
    noise = [torch.Generator().manual_seed(text) for text in range(texts)]
    out = model(ids[:, :prompt].repeat(2, 1), use_cache=True, logits_to_keep=1)
    cache = cache_of(out)
    for following in ids[:, prompt:].T:
        logits = out.logits[:, -1].float()
        likeliest.append(logits[:texts].argmax(1))
        nats.append(-logits[:texts].log_softmax(1).gather(1, following[:, None])[:, 0])
        own.append(torch.stack([drawn(row, each, TEMPERATURE) for row, each in zip(logits[texts:], noise)]))
        out = model(torch.cat([following, own[-1]])[:, None], **{CACHE: cache}, use_cache=True)
    repeats = [repetition(row) for row in torch.stack(own, 1).tolist()]
    return torch.stack(likeliest, 1), torch.stack(nats, 1), repeats


def shown(lines):
    groups = collections.defaultdict(list)
    for line in lines:
        groups[line["policy"], line["budget"]].append(line)
    for (policy, budget), own in groups.items():
        text = f"{policy:20} {budget:5} n {len(own)}"
        for name in ("agreement", "nats", "repetition"):
            values = [line[name] for line in own]
            text += f"  {name} {sum(values) / len(values):.3f} ±{student(values):.3f}"
        quarters = [sum(each) / len(own) for each in zip(*(line["quarters"] for line in own))]
        print(text + "  by quarter " + " ".join(f"{each:.3f}" for each in quarters))


@torch.no_grad()
def main():
    given = dict(model="", haystack="", policies=POLICIES, budget=128, prompt=256, tokens=1600, texts=2)
    args = arguments(__doc__, "out", **given, dtype="float32")
    torch.set_num_threads(1)
    out, folder = Path(args.out), args.model or kvevict.small_llama()
    done = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    known = {(line["policy"], line["budget"]) for line in done}
    missing = [name for name in args.policies if (name, args.budget) not in known]
    if not missing:
        return shown(done)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, args.dtype)).eval()
    tokenizer, length = AutoTokenizer.from_pretrained(folder), args.prompt + args.tokens
    books = Path(args.haystack) if args.haystack else None
    settings = TaskSettings(tokenizer, length, args.texts, haystack=books)
    ids = []
    for text in range(args.texts):
        passage = haystack(settings).passage(settings.rng("long", text), length + length // 4, settings)
        ids.append(tokenizer(passage, return_tensors="pt").input_ids[0, :length])
    ids = torch.stack(ids)
    full, right, again = measured(model, ids, args.prompt)

    def note(policy, budget, likeliest, nats, repeats):
        same, above = (likeliest == full).float(), (nats - right).mean(1)
        with out.open("a") as file:
            for text in range(args.texts):
                quarters = same[text].view(4, -1).mean(1).tolist()
                line = dict(policy=policy, budget=budget, text=text, agreement=float(same[text].mean()))
                line |= dict(quarters=quarters, nats=float(above[text]), repetition=repeats[text])
                print(json.dumps(line), file=file)
                done.append(line)

    if (FULL, 0) not in known:
        note(FULL, 0, full, right, again)
    for name in missing:
        with kvevict.evicting(model, name, budget=args.budget, tokenizer=tokenizer):
            note(name, args.budget, *measured(model, ids, args.prompt))
    shown(done)


if __name__ == "__main__":
    main()
