"""Several questions about one text: what is answered with the full cache, and under policies with and without recall.

    bench_turns.py MODEL FILE [--way chat|answer] [--texts 6] [--tokens 1500] [--budget 128] [--arms full,take+edie,..]

FILE is plain text of a book. Each text has five facts of five kinds (a number, two words, a year, two names) at random
depths, and is asked for each of them. "chat": turns of one chat by plain `generate` on one cache, the first question
after the text, the model's own answers in the history. "answer": the text is read without a question, and each question
is asked of a fork. An arm is a policy's text (`snapkv:recall=true`), read in chunks of 512; read-twice keeps half.
Prints a line a text and arm, then the right answers with Wilson's interval, of a chat also by turn."""

import argparse
import itertools
import random
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import kvevict
from kvevict.compat import CACHE
from kvevict.lab.evaluate.intervals import of_scores

TOWNS = ["Ashwell", "Brockton", "Fenmoor", "Hartlow", "Selby", "Wexham", "Oakrise", "Linmouth", "Tarrow", "Corvale"]
TOWNS += ["Denby", "Ellwood"]
WORDS = ["basket", "candle", "velvet", "island", "kettle", "orchard", "silver", "pebble", "window", "garden"]
WORDS += ["thimble", "arrow"]
FIRST = ["Clara", "Edmund", "Beatrix", "Hugo", "Sylvia", "Walter", "Agnes", "Rupert"]


def facts(rng):
    """[(the fact, its question, the answer)]"""

    def name(*last):
        return f"{rng.choice(FIRST)} {rng.choice(last)}"

    kinds = [
        ("The locker number of the station at {} is {}", "What is the locker number of the station at {}?",
         lambda: str(rng.randrange(10**5, 10**6))),
        ("The motto of the guild of {} is {}", "What is the motto of the guild of {}?",
         lambda: " ".join(rng.sample(WORDS, 2))),
        ("The ferryman of {} is called {}", "What is the ferryman of {} called?",
         lambda: name("Penrose", "Lowell", "Garrick", "Aldous")),
        ("The bridge of {} was opened in {}", "When was the bridge of {} opened?",
         lambda: str(rng.randrange(1601, 1799))),
        ("The best cheese of {} is sold by {}", "Who sells the best cheese of {}?",
         lambda: name("Thackeray", "Whitby", "Marlow", "Finch")),
    ]  # fmt: skip
    towns = rng.sample(TOWNS, 5)
    rng.shuffle(kinds)
    made = []
    for town, (tells, asks, value) in zip(towns, kinds, strict=True):
        said = value()
        made.append((tells.format(town, said), asks.format(town), said))
    return made


def texts(tokenizer, file, count, tokens):
    """(text, [(question, answer)] in random order) of each number below `count`."""
    book = Path(file).read_text("utf-8").replace("\n", " ").split(". ")
    sentences = [each for each in book if 20 < len(each) < 300]
    for number in range(count):
        rng = random.Random(900 + number)
        known, at, body = facts(rng), rng.randrange(len(sentences) - 400), []
        while len(tokenizer(". ".join(body), add_special_tokens=False)["input_ids"]) < tokens:
            body.append(sentences[at])
            at += 1
        for fact, _, _ in known:
            body.insert(rng.randrange(len(body)), fact)
        rng.shuffle(known)
        yield ". ".join(body) + ".", [each[1:] for each in known]


def chat(model, tokenizer, text, questions):
    """The answers of one chat."""
    asked = [dict(role="user", content="<1>"), dict(role="assistant", content="<2>"), dict(role="user", content="<3>")]
    whole = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    head, rest = whole.split("<1>")
    opens, rest = rest.split("<2>")
    between = rest.split("<3>")[0]
    cache, history, said = DynamicCache(config=model.config), [], []
    for turn, question in enumerate(questions):
        more = f"{between if turn else f'{head}{text}' + chr(10) * 2}{question}{opens}"
        history += tokenizer(more, add_special_tokens=False)["input_ids"]
        ids = torch.tensor([history])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **{CACHE: cache}, max_new_tokens=16,
                             do_sample=False, pad_token_id=0)[0]  # fmt: skip
        said.append(tokenizer.decode(out[len(history) :], skip_special_tokens=True))
        history = out.tolist()
    return said


def answers(model, tokenizer, way, arm, budget, text, questions):
    name = arm.partition(":")[0]
    named = dict(budget=0.5 if name == "read-twice" else budget, chunk_size=512)
    if name == "full":
        arm, named = "snapkv", dict(budget=1 << 20)
    if way == "answer":
        cache = kvevict.read(model, tokenizer, text, arm, **named)
        return kvevict.answer(model, tokenizer, cache, questions, max_new_tokens=16)
    with kvevict.evicting(model, arm, tokenizer=tokenizer, **named):
        return chat(model, tokenizer, text, questions)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("file")
    parser.add_argument("--way", choices=("chat", "answer"), default="chat")
    parser.add_argument("--texts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--budget", type=int, default=128)
    parser.add_argument("--arms", default="full,take+edie,take+edie:recall=true")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).eval()
    right: dict = {arm: [] for arm in args.arms.split(",")}
    for number, (text, known) in enumerate(texts(tokenizer, args.file, args.texts, args.tokens)):
        questions, wanted = zip(*known, strict=True)
        for arm, found in right.items():
            began = time.perf_counter()
            said = answers(model, tokenizer, args.way, arm, args.budget, text, list(questions))
            found.append([want in each for want, each in zip(wanted, said, strict=True)])
            print(number, arm, list(map(int, found[-1])), f"{time.perf_counter() - began:.0f} s", flush=True)
    for arm, found in right.items():
        _, low, high = of_scores([*itertools.chain(*found)])
        turns = f", by turn {[sum(each) for each in zip(*found, strict=True)]}" if args.way == "chat" else ""
        print(f"{arm}: {sum(map(sum, found))} of {5 * len(found)} [{low:.0%}, {high:.0%}]{turns}")


if __name__ == "__main__":
    main()
