"""Questions about a text in the text's own language: right answers of those that the full cache gives.

    python tests/benchmarks/bench_languages.py OUT.jsonl MODEL FOLDER --languages en de zh [--shares 1/16]
    python tests/benchmarks/bench_languages.py OUT.jsonl --table

FOLDER has xquad.LANGUAGE.json, data sets in SQuAD's format (XQuAD: parallel texts in 12 languages). A text has 1,900
tokens of paragraphs from several articles; then comes a question about one of them, in the model's chat template, whose
answer has at most 30 characters. A line is appended for every answer, so an interrupted run goes on where it ended. An
answer is right that contains a right one. Nats are those a token of the right answer, above the full cache's."""

import argparse
import itertools
import json
import random
from collections import defaultdict
from fractions import Fraction
from pathlib import Path
from statistics import fmean

import torch
from bench_requests import NEW, decoded, encoded, key, lines_of, nats, read

import kvevict
from kvevict.evaluate.intervals import of_scores, student
from kvevict.evaluate.metrics import METRICS
from kvevict.prompts import ids_of

LENGTH, REQUEST = 1900, 80  # tokens of a prompt, and those left for its question and the template
SHORT = 30  # characters of an answer


def cases(tokenizer, articles, text: int, most: int):
    """(prompt, right answers) of questions about a text, each about another paragraph; no answer is in its question."""
    rng, room, taken = random.Random(text), LENGTH - REQUEST, []
    paragraphs = [paragraph for article in articles for paragraph in article["paragraphs"]]
    for paragraph in rng.sample(paragraphs, len(paragraphs)):
        size = len(ids_of(tokenizer, paragraph["context"] + "\n\n"))
        if size <= room:
            taken.append(paragraph)
            room -= size
    body = "\n\n".join(paragraph["context"] for paragraph in taken)
    for paragraph in rng.sample(taken, len(taken))[:most]:
        pairs = [
            (each["question"].strip(), [answer["text"] for answer in each["answers"]]) for each in paragraph["qas"]
        ]
        short = [(q, right) for q, right in pairs if len(right[0]) <= SHORT and not METRICS["contains_any"](q, right)]
        for question, right in short[:1]:
            yield f"{body}\n\n{question}", right


def right_answer(model, tokenizer, logits, cache, answers) -> tuple:
    """(whether the answer that follows has a right one, its text up to there)."""
    told: list = []
    for each, _ in zip(decoded(model, tokenizer, logits, cache), range(NEW)):
        told.append(each)
        said = tokenizer.decode(told, skip_special_tokens=True)
        if METRICS["contains_any"](said, answers):
            return True, said
    return False, tokenizer.decode(told, skip_special_tokens=True)


@torch.no_grad()
def measure(args):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    known = {key(line): line for line in lines_of(args.out)}
    slides = getattr(model.config, "sliding_window", None) and "sliding_attention" in (model.config.layer_types or ())

    def told(line, ids, answers, past=None):
        """(whether the answer of a case is right, the cache where it was read now)."""
        if key(line) in known:
            return known[key(line)]["right"], None
        logits, cache = read(model, ids, past)
        right, said = right_answer(model, tokenizer, logits, cache, answers)
        line |= dict(right=right, said=said, answers=answers, tokens=ids.shape[1])
        line |= dict(nats=nats(model, logits, cache, ids_of(tokenizer, answers[0])))
        known[key(line)] = line
        with args.out.open("a") as file:
            print(json.dumps(line, ensure_ascii=False), file=file)
        return right, cache

    for text, language in itertools.product(range(args.start, args.texts), args.languages):
        articles = json.loads((args.folder / f"xquad.{language}.json").read_text())["data"]
        last = None
        for number, (prompt, answers) in enumerate(cases(tokenizer, articles, text, args.questions)):
            ids = encoded(tokenizer, [dict(role="user", content=prompt)])["input_ids"]
            at = dict(model=Path(args.model).name, half=language, text=text, form=f"question {number}")
            right, cache = told(
                at | dict(name="full", share="1", policy="full"), ids, answers, None if slides else last
            )
            last = (ids, cache) if cache else last
            for share in args.shares if right else ():
                options = dict(budget=float(Fraction(share)), chunk_size=512, tokenizer=tokenizer)
                with kvevict.evicting(model, args.policy, **options):
                    told(at | dict(name=args.name, share=share, policy=args.policy), ids, answers)


def table(args):
    lines, found = lines_of(args.out), defaultdict(list)
    full = {key(line)[:4]: line for line in lines if line["name"] == "full"}
    for line in lines:
        of, language = full[key(line)[:4]], line["half"]
        for where in {language, "~all", "~en" if language == "en" else "~others"}:
            at = (line["model"], line["policy"], line["share"], line["name"], where)
            found[at].append((float(line["right"]), line["nats"] - of["nats"]))
    for where, each in sorted(found.items()):
        right, more = zip(*each)
        _, low, high = of_scores(right)
        print(*where, f"{sum(right):.0f} of {len(right)} [{100 * low:.0f}, {100 * high:.0f}]",
              f"{fmean(more):+.3f} +- {student(more):.3f} nats", sep="\t")  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("model", nargs="?")
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--dtype", default="bfloat16", help="a name of torch; a run's lines are of one")
    parser.add_argument("--languages", nargs="+", default=["en"])
    parser.add_argument("--name", default="now")
    parser.add_argument("--policy", default="take+edie")
    parser.add_argument("--shares", nargs="*", default=["1/16", "1/32"])
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--questions", type=int, default=6, help="of each text, at most")
    args = parser.parse_args()
    (table if args.table else measure)(args)
