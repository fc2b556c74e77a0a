"""Writes prompts to train lookahead rows on, from your own texts and in a model's chat template.

    python examples/lookahead_data.py --model DIR_OR_HUB_ID --texts TEXTS.jsonl --out PROMPTS.jsonl

A line of TEXTS.jsonl has a `text` and, optionally, `questions` about it. A quarter of the prompts each: a text that
ends at a random word; a passage and a sentence of it, for what follows; a passage with a question or task; a passage
with made-up facts and a question for one. `kvevict train --responses model` lets the model write the responses.
"""

import argparse
import json
import random
import re
from pathlib import Path

from transformers import AutoTokenizer

PARTS = ("al", "be", "cor", "du", "fen", "gi", "lo", "mar", "ni", "os", "ra", "tev")  # of names
THINGS = ("account", "age", "badge", "berth", "fee", "locker", "permit", "phone", "rank", "room", "ticket", "weight")
TASKS = ("Summarize the text in two sentences.", "Who is named in the text, and what do they do?", "How does it end?")


def asked(rng, kind, words, questions):
    """Return (a passage and its question, first words of the answer)."""
    sentences, opening = re.split(r"(?<=[.!?]) ", " ".join(words)), ""
    question = rng.choice(questions or TASKS)
    if kind == "following":
        question = f'Which sentence of the text follows "{rng.choice(sentences)}"?'
    elif kind == "fact":
        for _ in range(rng.randint(3, 10)):
            fact = f"{''.join(rng.choices(PARTS, k=3)).capitalize()}'s {rng.choice(THINGS)}"
            value = rng.choice([str(rng.randrange(1000, 10**7)), " ".join(rng.choices(words, k=2))])
            sentences.insert(rng.randint(0, len(sentences)), f"{fact} is {value}.")
        question, opening = f"What is {fact}?", rng.choice([f"{fact} is", ""])
    return f"{' '.join(sentences)}\n\n{question}", opening


def encoded(tokenizer, text, opening):
    """Return token ids. opening: the answer's first words, or None for a text that is not in the chat template."""
    if opening is None or not tokenizer.chat_template:
        return tokenizer(text if opening is None else f"{text}\nAnswer: {opening}".rstrip())["input_ids"]
    chat = tokenizer.apply_chat_template([dict(role="user", content=text)], tokenize=False, add_generation_prompt=True)
    return tokenizer(chat + opening, add_special_tokens=False)["input_ids"]


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
for option in ("--model", "--texts", "--out"):
    parser.add_argument(option, required=True)
parser.add_argument("--count", type=int, default=1000)
parser.add_argument("--words", type=int, nargs=2, default=[80, 500], help="of a passage, at least and at most")
args = parser.parse_args()
tokenizer, rng, (least, most) = AutoTokenizer.from_pretrained(args.model), random.Random(0), args.words
texts = [json.loads(line) for line in Path(args.texts).read_text("utf-8").splitlines()]
with open(args.out, "w", encoding="utf-8") as file:
    for number in range(args.count):
        text, kind = rng.choice(texts), ("continued", "following", "question", "fact")[number % 4]
        words, questions = text["text"].split(), text.get("questions")
        count = round(least * (most / least) ** rng.random())
        first = 0 if questions else rng.randrange(max(1, len(words) - count))
        words = words[first : first + count]
        made = (" ".join(words), None) if kind == "continued" else asked(rng, kind, words, questions)
        file.write(json.dumps(dict(prompt=encoded(tokenizer, *made))) + "\n")
