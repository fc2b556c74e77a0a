"""Agents: what is kept of a tool's result, and what is answered.

    agents.py MODEL [TEMPLATE [TEXTS [BUDGET [ARMS]]]]

The user asks for one of four codes, a tool is called, and its result has them in about 800 tokens of other text: a
page with questions, one without, two results, or JSON after a system prompt and the tools' schemas. TEMPLATE: of
tests/lib/templates.py; default: the model's own. For the full cache and for `take+edie` (BUDGET slots, 96 by default,
chunks of 512), whose question is found or named: how many of TEXTS (40) answers have the code, with Wilson's interval,
and the share of heads that hold all of its tokens, with the interval of its mean (t)."""

import contextlib
import json
import random
import statistics
import sys

import templates
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvevict
from kvevict.asking.tokens import find
from kvevict.lab.evaluate.intervals import of_scores

WHO = "baker smith potter miller weaver fisher carter cooper mason tanner".split()  # noqa: SIM905
DID = "counted painted moved sold washed mended lost found hid wrapped".split()  # noqa: SIM905
WHAT = "boats jars nails ropes sacks lamps keys maps hats wheels".split()  # noqa: SIM905
WHERE = "harbour mill market tower bridge garden stable cellar chapel orchard".split()  # noqa: SIM905
SYLLABLES = "na is let bre am uth quor rin sti thel or shan vel mok tas dun".split()  # noqa: SIM905
KINDS = ("a page with questions", "a page without", "two results", "JSON, system prompt, schemas")
ASKS = "Which one? Say its address."
ADDRESS = dict(type="object", properties=dict(url=dict(type="string", description="Which page?")), required=["url"])
SCHEMAS = [
    dict(type="function", function=dict(name=name, description=f"{name} a page. {ASKS}", parameters=ADDRESS))
    for name in ("fetch", "search", "store")
]


def sentences(rng, count, asks):
    made = []
    for _ in range(count):
        who, did, what, where = map(rng.choice, (WHO, DID, WHAT, WHERE))
        made.append(f"Who {did} the {what} in the {where}?" if asks and rng.random() < 0.2 else
                    f"The {who} {did} the {what} in the {where} and went home before it rained.")  # fmt: skip
    return made


def chat(rng, number):
    """(kind, messages, tools, the user's question, the fact's text, its code)."""
    kind = KINDS[number % len(KINDS)]
    names = ["".join(rng.sample(SYLLABLES, 3)).title() for _ in range(4)]
    codes = [str(rng.randrange(100_000, 1_000_000)) for _ in names]
    lines = sentences(rng, 48, kind != KINDS[1])
    for at, (name, code) in enumerate(zip(names, codes)):
        lines.insert(rng.randrange(12 * at, 12 * at + 12) + at, f"The code of {name} is {code}.")
    which, text = rng.randrange(4), " ".join(lines)
    results = {kind: [text] for kind in KINDS} | {
        KINDS[2]: [text, '{"status": "ok", "more?": null}'],
        KINDS[3]: [json.dumps(dict(status="ok", query="codes?", lines=lines), indent=1)],
    }
    asked = f"What is the code of {names[which]}?"
    messages = [dict(role="system", content="You answer in one line. Are you not sure? Say so.")] * (kind == KINDS[3])
    messages.append(dict(role="user", content=f"Read the page of the village. {asked}"))
    call = dict(id="callnine1", type="function", function=dict(name="fetch", arguments=dict(url="village.example")))
    messages.append(dict(role="assistant", content="", tool_calls=[call] * len(results[kind])))
    messages += [dict(role="tool", name="fetch", tool_call_id="callnine1", content=each) for each in results[kind]]
    tools, fact = SCHEMAS if kind == KINDS[3] else None, f"The code of {names[which]} is {codes[which]}"
    return kind, messages, tools, asked, fact, codes[which]


def main(folder, template="", texts=40, budget=96, arms="full,found,named"):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    tokenizer.chat_template = getattr(templates, template) if template else tokenizer.chat_template
    found, rng, lengths = {}, random.Random(61), []
    for number in range(int(texts)):
        kind, messages, tools, asked, fact, code = chat(rng, number)
        text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        row, n = ids[0].tolist(), ids.shape[1]
        lengths.append(n)
        start, stop = find(tokenizer, row, fact)
        start += find(tokenizer, row[start:stop], code)[0]
        options = dict(budget=int(budget), chunk_size=512)
        for arm in arms.split(","):
            held = 1.0
            if arm == "full":
                out = model.generate(ids, max_new_tokens=14, do_sample=False)
            else:
                kvevict.patch(model, "take+edie", tokenizer=tokenizer, **options)
                named = kvevict.observing(asked, tokenizer) if arm == "named" else contextlib.nullcontext()
                with named:
                    out = model.generate(ids, max_new_tokens=14, do_sample=False)
                kept = kvevict.report(model, positions=True)["positions"]
                heads = [head for layer in kept if layer is not None for head in layer[0]]
                held = statistics.fmean({*range(start, stop)} <= {*head} for head in heads)
                kvevict.unpatch(model)
            said = tokenizer.decode(out[0, n:], skip_special_tokens=True)
            for each in (kind, "all"):
                found.setdefault((arm, each), []).append((code in said, held))
    print(f"{statistics.fmean(lengths):.0f} tokens")
    for (arm, kind), each in found.items():
        right, held = zip(*each)
        _, low, high = of_scores(right)
        width = 2.02 * statistics.stdev(held) / len(held) ** 0.5 if len(held) > 1 else 0.0
        mean = statistics.fmean(held)
        print(
            f"{arm:6} {kind:28} {sum(right):3} of {len(right)} [{low:.0%}, {high:.0%}]  heads {mean:.1%} +- {width:.1%}"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
