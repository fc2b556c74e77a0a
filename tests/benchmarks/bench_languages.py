"""Questions about a text in the text's own language: right answers of those that the full cache gives, by language.

    python tests/benchmarks/bench_languages.py OUT.jsonl MODEL FOLDER --languages en de zh [--shares 1/16] [--texts 8]
    python tests/benchmarks/bench_languages.py OUT.jsonl --table
    python tests/benchmarks/bench_languages.py - MODEL FOLDER --found --languages en de zh

FOLDER has xquad.LANGUAGE.json, data sets in SQuAD's format (XQuAD: parallel texts in 12 languages). A text has 1,900
tokens of paragraphs from several articles; then comes a question about one of them, in the model's chat template, whose
answer has at most 30 characters. Lines and table are those of bench_requests.py, with a language in the form's place;
"opened" is the answer that the 40 characters before it in the text open. Nats are those a token of the right answer.
--found counts the data's questions that `kvevict.question` finds after eight paragraphs, and the paragraphs' tokens."""

import argparse
import itertools
import json
import random
import time
from fractions import Fraction
from pathlib import Path

import torch
from bench_requests import NEW, add, decoded, encoded, key, nats, read, start_of, table

import kvevict
from kvevict.lab.evaluate.metrics import METRICS
from kvevict.prompts import ids_of
from kvevict.question import question_of

LENGTH, REQUEST = 1900, 80  # tokens of a prompt, and those left for its question and the template
SHORT, OPENING = 30, 40  # characters of an answer, and of the words that open it
within = METRICS["contains_any"]


def cases(tokenizer, articles, text: int, most: int):
    """(prompt, opening, right answers) of questions about a text, each about another paragraph."""
    rng, room, taken = random.Random(text), LENGTH - REQUEST, []
    paragraphs = [paragraph for article in articles for paragraph in article["paragraphs"]]
    for paragraph in rng.sample(paragraphs, len(paragraphs)):
        size = len(ids_of(tokenizer, paragraph["context"] + "\n\n"))
        if size <= room:
            taken.append(paragraph)
            room -= size
    body = "\n\n".join(paragraph["context"] for paragraph in taken)
    for paragraph in rng.sample(taken, len(taken))[:most]:
        for asked in paragraph["qas"]:
            question, answers = asked["question"].strip(), [answer["text"] for answer in asked["answers"]]
            before = paragraph["context"][: asked["answers"][0]["answer_start"]].rstrip()[-OPENING:]
            words = before.partition(" ")[2] or before
            if len(answers[0]) <= SHORT < len(before) and not within(question + words, answers):
                yield f"{body}\n\n{question}", words, answers
                break


def said(model, tokenizer, logits, cache, answers, most: int, opens: str = "") -> tuple:
    """(whether an answer of at most `most` tokens has a right one, its text up to there)."""
    told: list = []
    for token in itertools.islice(decoded(model, tokenizer, logits, cache, opens), most):
        told.append(token)
        if within(tokenizer.decode(told, skip_special_tokens=True), answers):
            return True, tokenizer.decode(told, skip_special_tokens=True)
    return False, tokenizer.decode(told, skip_special_tokens=True)


@torch.no_grad()
def measure(args):
    model, tokenizer, known, slides = start_of(args)

    def told(line, ids, opening, answers, past=None):
        """(the line of a case, the cache if it was read now)."""
        if key(line) in known:
            return known[key(line)], None
        start = time.process_time()
        logits, cache = read(model, ids, past)
        seconds, right = round(time.process_time() - start, 2), ids_of(tokenizer, answers[0])
        free, answer = said(model, tokenizer, logits, cache, answers, NEW)
        opened, words = said(model, tokenizer, logits, cache, answers, len(right) + 4, opening)
        line |= dict(free=free, opened=opened, seconds=seconds, tokens=ids.shape[1], answers=answers)
        line |= dict(said=dict(free=answer, opened=words), nats=nats(model, logits, cache, right))
        add(line, known, args.out)
        return line, cache

    for text, language in itertools.product(range(args.start, args.texts), args.languages):
        articles = json.loads((args.folder / f"xquad.{language}.json").read_text())["data"]
        last = None
        for number, (prompt, *case) in enumerate(cases(tokenizer, articles, text, args.questions)):
            ids = encoded(tokenizer, [dict(role="user", content=prompt)])["input_ids"]
            at = dict(model=Path(args.model).name, half="xquad", text=f"{text}/{number}", form=language)
            line = at | dict(name="full", share="1", policy="full")
            full, cache = told(line, ids, *case, None if slides else last)
            last = (ids, cache) if cache else last
            for share in args.shares if full["free"] or full["opened"] else ():
                options = dict(budget=float(Fraction(share)), chunk_size=512, tokenizer=tokenizer)
                with kvevict.evicting(model, args.policy, **options):
                    told(at | dict(name=args.name, share=share, policy=args.policy), ids, *case)


def finds(args):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    for language in args.languages:
        articles = json.loads((args.folder / f"xquad.{language}.json").read_text())["data"]
        paragraphs = [paragraph for article in articles for paragraph in article["paragraphs"]]
        found = []
        for at, paragraph in enumerate(paragraphs):
            body = "\n\n".join(paragraphs[(at + more) % len(paragraphs)]["context"] for more in range(8))
            asked = [each["question"].strip() for each in paragraph["qas"]]
            found += [question_of(f"{body}\n\n{question}") == question for question in asked]
        tokens = sum(len(ids_of(tokenizer, paragraph["context"])) for paragraph in paragraphs)
        print(language, f"{sum(found)} of {len(found)}", f"{tokens} tokens", sep="\t")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("model", nargs="?")
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--found", action="store_true")
    parser.add_argument("--dtype", default="bfloat16", help="a name of torch; a run's lines are of one")
    parser.add_argument("--languages", nargs="+", default=["en"])
    parser.add_argument("--name", default="now")
    parser.add_argument("--policy", default="take+edie")
    parser.add_argument("--shares", nargs="*", default=["1/16", "1/32"], help="none: the full cache alone")
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--questions", type=int, default=4, help="of each text, at most")
    args = parser.parse_args()
    (table if args.table else finds if args.found else measure)(args)
