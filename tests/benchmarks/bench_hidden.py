"""Right answers where the question is not known while the text is read.

    python tests/benchmarks/bench_hidden.py --model DIR --texts FILE... [--tokens 2000] [--policies kvzip keydiff ...]
        [--shares 1/8 1/4 1/2]

Each text gets facts in sentences of its own, of seven digits and of words, spread evenly; it is read once for each
policy and share of its tokens (`kvevict.read`), and every fact is asked about from a fork (`kvevict.answer`). An answer
is right if it contains the fact. Prints one JSON line a text and, at the end, a table over the facts that the full
cache (a budget above all tokens) answers, with Wilson's 95 % intervals.
"""

import argparse
import json
import random
from fractions import Fraction

import torch

import kvevict
from kvevict.analysis.run import load_model
from kvevict.commands import grid
from kvevict.evaluate.intervals import of_scores
from kvevict.prompts import first_ids

NUMBERS = [
    (f"The code of the {place} is {{}}.", f"What is the code of the {place}?")
    for place in ("lighthouse", "warehouse", "bakery", "library")
]
WORDS = [
    ("The captain of the ship Meridian is called {}.", "What is the captain of the ship Meridian called?",
     ("Conrad Quill", "Amos Tarrant", "Silas Venn", "Jonas Pike")),
    ("The favourite fruit of the mayor is the {}.", "What is the favourite fruit of the mayor?",
     ("quince", "apricot", "mulberry", "pomegranate")),
    ("The treasure was buried in the town of {}.", "In which town was the treasure buried?",
     ("Aldbury", "Marlow", "Whitby", "Kendal")),
    ("The password of the night watch is {}.", "What is the password of the night watch?",
     ("silver otter", "broken anchor", "yellow candle", "copper thistle")),
]  # fmt: skip
FULL = ("streaming", 2**20)


def planted(text, rng):
    """The text with a fact after every eighth of its sentences, and [(question, answer)]."""
    facts = [(said, ask, str(rng.randrange(10**6, 10**7))) for said, ask in NUMBERS]
    facts += [(said, ask, rng.choice(answers)) for said, ask, answers in WORDS]
    rng.shuffle(facts)
    sentences = text.split(". ")
    for number in reversed(range(len(facts))):
        said, _, answer = facts[number]
        sentences.insert((2 * number + 1) * len(sentences) // (2 * len(facts)), said.format(answer)[:-1])
    return ". ".join(sentences), [(ask, answer) for _, ask, answer in facts]


def right(model, tokenizer, text, facts, policy, budget, options) -> list:
    cache = kvevict.read(model, tokenizer, text, policy, budget=budget, **options)
    asked = [ask for ask, _ in facts]
    given = kvevict.answer(model, tokenizer, cache, asked, max_new_tokens=20, one_line=True)
    return [answer.lower() in said.lower().replace(",", "") for (_, answer), said in zip(facts, given, strict=True)]


def cell(hits: list) -> str:
    _, low, high = of_scores(list(map(int, hits)))
    return f"{sum(hits)} [{100 * low:.0f}, {100 * high:.0f}]"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--texts", required=True, nargs="+", help="files of plain text")
    parser.add_argument("--tokens", type=int, default=2000, help="of a text; default 2000")
    parser.add_argument("--policies", nargs="+", default=["kvzip", "keydiff", "snapkv", "streaming"])
    parser.add_argument("--shares", nargs="+", type=Fraction, default=[Fraction(1, n) for n in (8, 4, 2)])
    parser.add_argument("--chunk-size", type=int, help="of all policies; default: each one's own")
    args = parser.parse_args()
    model, tokenizer = load_model(args.model, "float32", "cpu")
    options = {} if args.chunk_size is None else dict(chunk_size=args.chunk_size)
    results: dict = {}
    for number, path in enumerate(args.texts):
        with open(path, encoding="utf-8") as file:
            ids, _ = first_ids(tokenizer, file.read(), args.tokens - 150)  # the facts' share
        text, facts = planted(tokenizer.decode(ids), random.Random(number))
        whole = right(model, tokenizer, text, facts, *FULL, {})
        facts = [fact for fact, known in zip(facts, whole, strict=True) if known]
        found = {
            f"{policy} {share}": right(model, tokenizer, text, facts, policy, float(share), options)
            for share in args.shares for policy in args.policies
        }  # fmt: skip
        print(json.dumps(dict(text=path, full=sum(whole), asked=len(whole), **found)), flush=True)
        for name, hits in dict(full=whole, **found).items():
            results.setdefault(name, []).extend(hits)
    rows = [("", *map(str, args.shares))]
    for policy in args.policies:
        rows.append((policy, *(cell(results[f"{policy} {share}"]) for share in args.shares)))
    known = results["full"]
    print(f"full cache: {sum(known)} of {len(known)}; of these:\n{grid(rows)}\n{torch.get_num_threads()} threads")


if __name__ == "__main__":
    main()
