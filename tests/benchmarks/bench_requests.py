"""Requests around a question: right answers of those that the full cache gives, by the form of the prompt.

    python tests/benchmarks/bench_requests.py OUT.jsonl MODEL BOOKS [--half table] [--shares 1/16 1/32] [--texts 8]
    python tests/benchmarks/bench_requests.py OUT.jsonl --table

A text has 1,900 tokens of a book and three facts. Each form of a prompt asks for them in words of two halves: "choose",
for decisions about the policy, and "table". A line is appended for every answer, so an interrupted run goes on where it
ended; --name tells runs of two commits apart. The full cache's answers are those of the name "full". "free" is the
answer that follows the prompt; "opened" is one that words of the fact open, after the prompt was read. Nats are those
a token of the full cache's answer, above the full cache's."""

import argparse
import copy
import itertools
import json
import random
import time
from collections import defaultdict
from fractions import Fraction
from pathlib import Path
from statistics import fmean

import torch

import kvevict
from kvevict.lab.evaluate.ask import forked
from kvevict.lab.evaluate.haystack import haystack
from kvevict.lab.evaluate.intervals import of_scores, student
from kvevict.lab.evaluate.metrics import METRICS
from kvevict.lab.evaluate.tasks import Settings
from kvevict.lab.evaluate.words import LISTS
from kvevict.policy.text import parse_policy
from kvevict.prompts import ids_of
from kvevict.writing import ends_of

LENGTH, NEW, SHORT = 1900, 40, 10
FACTS = dict(
    toll=(
        "The toll for crossing the {of} bridge was fixed at {answer} crowns.",
        "What was the toll for crossing the {of} bridge?",
        "the toll for crossing the {of} bridge",
    ),
    keeper=(
        "The keeper of the lighthouse at {of} was a certain {answer}.", "Who was the keeper of the lighthouse at {of}?",
        "the name of the keeper of the lighthouse at {of}",
    ),
    watchword=(
        "The watchword at the {of} gate that night was {answer}.",
        "What was the watchword at the {of} gate that night?",
        "the watchword at the {of} gate that night",
    ),
)  # fmt: skip
GERMAN = (
    "Der Zoll auf der Brücke von {of} betrug genau {answer} Kronen.", "Wie hoch war der Zoll auf der Brücke von {of}?",
    "den Zoll auf der Brücke von {of}",
)  # fmt: skip
SYSTEM = dict(
    choose="You help readers of old novels. Keep to the text, be brief, and never guess.",
    table="You are a librarian. People send you pages and ask about them. Reply politely, in plain English, with the "
    "detail that was asked for and nothing else, and say so if the pages do not have it.",
)
# {q} the question, {n} the same as a noun, {other} another question, {text} the text.
FORMS: dict = dict(
    last=dict(choose="{text}\n\n{q}", table="{text}\n\n{q}"),
    system=dict(choose="{text}\n\n{q}", table="{text}\n\n{q}"),
    both=dict(
        choose="{q}\n\n{text}\n\n{q}",
        table="I have a question about these pages: {q}\n\n{text}\n\nOnce more, my question: {q}",
    ),
    after=dict(
        choose="{text}\n\n{q}\n\nWrite one sentence. Leave out lists, headings, quotation marks and remarks of "
        "your own.",
        table="{text}\n\n{q}\n\nReply with a single sentence of at most fifteen words. No greeting, no list and no "
        "markup, please, and nothing that is not in the pages.",
    ),
    after_long=dict(
        choose="{text}\n\n{q}\n\nStyle: use the past tense and simple words, as for a child of ten. Spell numbers and "
        "names exactly as the text does. Do not begin with 'According to the text'. Do not mention these rules, and do "
        "not comment on the author, the plot or the quality of the writing. One sentence is enough.",
        table="{text}\n\n{q}\n\nThe reply goes straight into a printed index, so three rules matter. It must be one "
        "plain sentence. Names and figures must be spelled as on the page. It must not contain any opinion, any "
        "apology, any second example or any hint for further reading, since the printer cuts off all that follows the "
        "first full stop.",
    ),
    around=dict(
        choose="{text}\n\nMy daughter reads this at school and has to answer a list of questions by tomorrow. {q} She "
        "thinks she saw it somewhere in the middle, but she is not sure. We would be grateful for a quick reply.",
        table="{text}\n\nOur reading circle met yesterday and nobody could remember one detail of these pages, "
        "although all of us had read them. {q} Please settle it for us, as the stakes are a round of drinks.",
    ),
    around_long=dict(
        choose="{text}\n\nI translate this novel into Danish, and the first edition differs from the second in many "
        "small places, so that I compare them line by line in the evenings. What you see above is from the second "
        "edition. {q} My own copy has a coffee stain on just that line, and the library opens on Monday only. If you "
        "could look it up for me I would be able to send off the chapter tonight. My editor has been patient so far, "
        "but she did write twice this week, and I would rather not ask her for more time again.",
        table="{text}\n\nFor a crossword that appears every Saturday in our village paper I collect odd facts from old "
        "books, and since the readers know most of the famous ones I try to use pages that hardly anybody has opened "
        "in a hundred years. {q} I did make a note of it when I first read the page, but the note has gone the way of "
        "all my notes. The puzzle is due at noon. Do not worry about how many letters it has, because I can still "
        "change the words that cross it, and the editor lets me use names as well as numbers.",
    ),
    few_shot=dict(choose="{q}", table="{q}"),
    two=dict(choose="{text}\n\n{other} {q}", table="{text}\n\nTwo things, please. {other} And then: {q}"),
    no_mark=dict(choose="{text}\n\nTell me {n}.", table="{text}\n\nI need {n}. Look it up in these pages."),
    first=dict(
        choose="Here is a question, and after it a text. {q}\n\n{text}\n\nPlease answer the question.",
        table="Find the answer to this in the pages below: {q}\n\n{text}\n\nThose were the pages. What is your answer?",
    ),
    edges=dict(choose="{text}\n\n{q}", table="{text}\n\n{q}"),
    german=dict(
        choose="{text}\n\n{q} Antworte in einem Satz.",
        table="{text}\n\nIch finde die Stelle nicht mehr. {q} Bitte nenne nur die Zahl und keine Erklärung.",
    ),
)
FORMS["both_early"] = FORMS["both"]


def cases(tokenizer, books, half: str, text: int):
    """(form, messages, right answers, opening of the first one, depth) of a text."""
    settings = Settings(tokenizer, LENGTH, 1, haystack=Path(books))
    rng = random.Random(f"{half}/{text}")
    names = rng.sample([word.capitalize() for word in LISTS["place"]], 4)
    people = [f"{rng.choice(LISTS['he'])} {word.capitalize()}" for word in rng.sample(LISTS["noun"], 4)]
    of = dict(toll=(names[0], str(rng.randrange(1000, 9999))), keeper=(names[1], people[0]),
              watchword=(names[2], rng.choice(LISTS["noun"])))  # fmt: skip
    filled = {kind: [line.format(of=o, answer=a) for line in FACTS[kind]] + [a] for kind, (o, a) in of.items()}
    number = str(rng.randrange(1000, 9999))
    german = [line.format(of=names[3], answer=number) for line in GERMAN] + [number]
    kinds = rng.sample([*filled], 3)
    depths = [(each + rng.random()) / 3 for each in range(3)]
    middle = {min(max(depth, 0.06), 0.94): filled[kind][0] for depth, kind in zip(depths, kinds)}
    edge = rng.choice((0.0, 0.03, 0.97, 1.0))
    draw = rng.random()

    def passage(facts):
        return haystack(settings).passage(random.Random(draw), LENGTH - 60, settings, facts=facts)

    plain = passage(middle)
    for number, (form, words) in enumerate(FORMS.items()):
        number = 0 if form == "both_early" else number % 3  # of the fact that is asked for, in the text's order
        kind, other = kinds[number], kinds[(number + 1) % 3]
        said, asked, noun, answer = german if form == "german" else filled[kind]
        body, depth = plain, round([*middle][number], 2)
        if form == "edges":
            facts = {d: f for d, f in middle.items() if f != filled[kind][0]}
            body, depth = passage(facts | {edge: filled[kind][0]}), edge
        if form == "german":
            body = passage(middle | {0.5: german[0]})
        content = words[half].format(text=body, q=asked, n=noun, other=filled[other][1])
        messages = [dict(role="user", content=content)]
        if form == "system":
            messages.insert(0, dict(role="system", content=SYSTEM[half]))
        if form == "few_shot":
            shots = [filled[each] for each in kinds if each != kind]
            turns = [dict(role="user", content=f"{body}\n\n{shots[0][1]}")]
            for at, (_, _, _, right) in enumerate(shots):
                follows = shots[at + 1][1] if at + 1 < len(shots) else content
                turns += [dict(role="assistant", content=f"{right}."), dict(role="user", content=follows)]
            messages = turns
        wanted, opening = (answer, filled[other][3]) if form == "two" else (answer,), said.partition(answer)[0].rstrip()
        yield form, messages, wanted, opening, depth


def encoded(tokenizer, messages):
    if tokenizer.chat_template:
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    text = "\n\n".join(f"Answer: {m['content']}" if m["role"] == "assistant" else m["content"] for m in messages)
    return tokenizer(f"{text}\n\nAnswer:", return_tensors="pt")


@torch.no_grad()
def read(model, ids, known=None):
    """(logits, cache) after ids [1, N]; known: (ids, cache) of an unpatched read whose common beginning is taken."""
    cache, start = None, 0
    if known is not None:
        most = min(ids.shape[1] - 1, known[0].shape[1])
        start = int((ids[0, :most] == known[0][0, :most]).long().cumprod(0).sum())
        cache = copy.deepcopy(known[1])
        if start < known[0].shape[1]:
            cache.crop(start - known[0].shape[1])  # minus the tokens to remove
    out = model(ids[:, start:], past_key_values=cache, use_cache=True, logits_to_keep=1)
    return out.logits, out.past_key_values


def decoded(model, tokenizer, logits, cache, opens: str = ""):
    """The ids of a greedy answer after a cache and the words that open it, without an end."""
    fork = forked(cache)
    more = ids_of(tokenizer, opens) if opens else []
    while True:
        if more:
            ids = torch.tensor([more], device=logits.device)
            logits = model(ids, past_key_values=fork, use_cache=True, logits_to_keep=1).logits
        more = [int(logits[0, -1].argmax())]
        if more[0] in ends_of(model, tokenizer):
            return
        yield more[0]


def answered(model, tokenizer, logits, cache, opening: str) -> dict:
    """The answer that follows the prompt, and the answer that an opening begins."""
    found: dict = {}
    for name, opens, most in (("free", "", NEW), ("opened", opening, SHORT)):
        told = [*itertools.islice(decoded(model, tokenizer, logits, cache, opens), most)]
        found[name] = tokenizer.decode(told, skip_special_tokens=True).strip()
        found.setdefault("ids", told)
    return found


def nats(model, logits, cache, ids) -> float:
    """The mean negative log likelihood of ids after a cache."""
    fork, ids = forked(cache), torch.tensor([ids])
    more = model(ids[:, :-1], past_key_values=fork, use_cache=True).logits if ids.shape[1] > 1 else logits[:, :0]
    return float(torch.nn.functional.cross_entropy(torch.cat([logits[:, -1:], more], 1)[0].float(), ids[0]))


def key(line) -> tuple:
    return tuple(line[each] for each in ("model", "half", "text", "form", "name", "share", "policy"))


def lines_of(path) -> list:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def start_of(args):
    """(model, tokenizer, {key: line} of the lines that OUT has, whether layers of the model have sliding windows)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype).eval()
    slides = getattr(model.config, "sliding_window", None) and "sliding_attention" in (model.config.layer_types or ())
    known = {key(line): line for line in lines_of(args.out)}
    return model, AutoTokenizer.from_pretrained(args.model), known, slides


def add(line, known, path):
    """Append a line to OUT."""
    known[key(line)] = line
    with path.open("a") as file:
        print(json.dumps(line, ensure_ascii=False), file=file)


@torch.no_grad()
def measure(args):
    model, tokenizer, known, slides = start_of(args)
    for text in range(args.start, args.texts):
        last = None
        for form, messages, answers, opening, depth in cases(tokenizer, args.books, args.half, text):
            if args.forms and form not in args.forms:
                continue
            ids = encoded(tokenizer, messages)["input_ids"]
            at = dict(model=Path(args.model).name, half=args.half, text=text, form=form)

            def told(name, share, policy, reads, response=None):
                line = at | dict(name=name, share=share, policy=policy)  # noqa: B023
                if key(line) not in known:
                    start = time.process_time()
                    logits, cache = reads()
                    seconds = round(time.process_time() - start, 2)
                    said = answered(model, tokenizer, logits, cache, opening)  # noqa: B023
                    judge = METRICS["contains_any"]
                    right = all(judge(said["free"], (each,)) for each in answers)  # noqa: B023
                    opened = bool(judge(said["opened"], answers[:1]))  # noqa: B023
                    line |= dict(free=right, opened=opened, seconds=seconds, tokens=ids.shape[1], depth=depth)  # noqa: B023
                    response = (said["ids"] or [0]) if response is None else response
                    line |= dict(said=said, answers=answers, nats=nats(model, logits, cache, response))  # noqa: B023
                    add(line, known, args.out)
                return known[key(line)]

            def whole():
                nonlocal last
                logits, cache = read(model, ids, None if slides else last)  # noqa: B023
                last = ids, copy.deepcopy(cache)  # noqa: B023
                return logits, cache

            full = told("full", "1", "full", whole)
            if not (full["free"] or full["opened"]):
                continue
            for policy in args.policies:
                for share in args.shares:
                    preset, options = parse_policy(policy)
                    options = dict(chunk_size=512) | options | dict(budget=float(Fraction(share)), tokenizer=tokenizer)
                    with kvevict.evicting(model, preset, **options):
                        told(args.name, share, policy, lambda: read(model, ids), full["said"]["ids"] or [0])  # noqa: B023


def table(args):
    lines = lines_of(args.out)
    full = {key(line)[:4]: line for line in lines if line["name"] == "full"}
    found = defaultdict(list)
    for line in lines:
        for how in ("free", "opened"):
            of = full[key(line)[:4]]
            if line["name"] != "full" and of[how]:
                for form in (line["form"], "~all"):
                    where = line["model"], line["half"], line["policy"], line["share"], how, form, line["name"]
                    found[where].append((float(line[how]), line["nats"] - of["nats"], line["seconds"]))
    for where, each in sorted(found.items()):
        right, more, seconds = zip(*each)
        _, low, high = of_scores(right)
        print(*where, f"{sum(right):.0f} of {len(right)} [{100 * low:.0f}, {100 * high:.0f}]",
              f"{fmean(more):+.3f} +- {student(more):.3f} nats", f"{fmean(seconds):.2f} s", sep="\t")  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("model", nargs="?")
    parser.add_argument("books", nargs="?")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--dtype", default="float32", help="a name of torch; a run's lines are of one")
    parser.add_argument("--half", choices=("choose", "table"), default="table")
    parser.add_argument("--name", default="now")
    parser.add_argument("--policies", nargs="+", default=["take+edie"])
    parser.add_argument("--shares", nargs="+", default=["1/16"])
    parser.add_argument("--forms", nargs="+")
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--texts", type=int, default=8)
    args = parser.parse_args()
    (table if args.table else measure)(args)
