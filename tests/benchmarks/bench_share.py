"""Requests that begin alike, asked of a server in this process: seconds, and right answers.

    python tests/benchmarks/bench_share.py OUT.jsonl --model DIR --haystack BOOKS [--sides auto ...] [--texts 0 1 2]
    python tests/benchmarks/bench_share.py OUT.jsonl --table

A text has 5,700 tokens of a book with 20 facts. A side asks for each of them: "recall" and "never" (without recall, so
that nothing is shared) with the text in the system prompt, "full" the same with a budget above all tokens, and "user"
of the text stored, in the user's turn. "chat" is a chat of ten turns with the text in its first message, "chat:never"
the same without recall. Seconds are those of the processor and of the clock, to the first token and to the last. A
side's lines are appended together, and an interrupted run goes on with the next side."""

import asyncio
import json
import random
import time
from collections import defaultdict
from pathlib import Path
from statistics import fmean, median

import httpx
import torch
from bench_read import arguments
from transformers import AutoTokenizer

from kvevict.lab.evaluate.haystack import haystack
from kvevict.lab.evaluate.metrics import METRICS
from kvevict.lab.evaluate.tasks import TaskSettings
from kvevict.lab.evaluate.words import LISTS
from kvevict.serve.app import application
from kvevict.serve.call import Call
from kvevict.serve.start import server_of

LENGTH, NEW, TURNS = 5700, 24, 10
LINES = (  # statement, question, the lists of the answer's words; none: a number
    ("The toll for crossing the {of} bridge was fixed at {answer} crowns.",
     "What was the toll for crossing the {of} bridge?", ()),
    ("The keeper of the lighthouse at {of} was a certain {answer}.", "Who was the keeper of the lighthouse at {of}?",
     ("he", "surname")),
    ("The watchword at the {of} gate that night was {answer}.", "What was the watchword at the {of} gate that night?",
     ("noun",)),
    ("The secret code of {of} is {answer}.", "What is the secret code of {of}?", ()),
)  # fmt: skip
FACTS = 20
UNITS = "first_cpu", "first_wall", "cpu", "wall"
SIDES = ["recall", "full", "never", "user", "chat", "chat:never"]


def text_of(tokenizer, books, number: int) -> tuple:
    """(a text, [(question, answer)])."""
    rng, settings = random.Random(f"share/{number}"), TaskSettings(tokenizer, LENGTH, 1, haystack=Path(books))
    asked, said = [], {}
    for at, word in enumerate(rng.sample(LISTS["place"], FACTS)):
        line, question, lists = LINES[at % len(LINES)]
        of = word.capitalize()
        answer = " ".join(rng.choice(LISTS[each]) for each in lists) or str(rng.randrange(1000, 9999))
        asked.append((question.format(of=of), answer))
        said[(at + rng.random()) / FACTS] = line.format(of=of, answer=answer)
    return haystack(settings).passage(rng, LENGTH, settings, facts=said), asked


firsts: list = []  # (seconds of the processor, of the clock) at the first token of each request


def noting(token):
    """`Call.token`, which notes when it is called first."""

    def noted(self):
        if self.first_token is None:
            firsts.append((time.process_time(), time.perf_counter()))
        token(self)

    return noted


class Client:
    def __init__(self, args, side: str):
        budget = 1 << 20 if side == "full" else args.budget
        policy = "take+edie:recall=false" if side.endswith("never") else "take+edie"
        options = dict(dtype=args.dtype, device="cpu", budget=budget, policy=policy, timeout=1e5)
        self.app = application(server_of(args.model, name="model", memory=8 << 30, **options))

    def post(self, path, **body):
        """(the response, its seconds)."""
        firsts.clear()
        before = time.process_time(), time.perf_counter()
        response = asyncio.run(self._post(path, body))
        after = time.process_time(), time.perf_counter()
        assert response.status_code == 200, response.text
        every = zip(UNITS, [*(firsts or [after])[0], *after], before + before, strict=True)
        return response.json(), {unit: end - start for unit, end, start in every}

    async def _post(self, path, body):
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post(path, json=body, timeout=36000)

    def chat(self, messages, **more):
        body, seconds = self.post("/v1/chat/completions", messages=messages, max_tokens=NEW, temperature=0, **more)
        details = body["usage"]["prompt_tokens_details"]
        facts = dict(tokens=body["usage"]["prompt_tokens"], cached=details["cached_tokens"])
        return body["choices"][0]["message"]["content"], facts | seconds


def answers(args, side: str, number: int, text: str, asked: list):
    client = Client(args, side)
    client.chat([dict(role="user", content="Good day.")])  # first calls allocate
    more, stored = {}, dict(role="system", content=text)
    if side == "user":
        client.post("/v1/kvevict/texts", name="text", text=text)
        more, stored = dict(kvevict=dict(text="text")), None
    turns: list = [dict(role="user", content=text)]
    for at, (question, answer) in enumerate(asked[:TURNS] if side.startswith("chat") else asked):
        user = dict(role="user", content=question)
        if side.startswith("chat"):
            turns = [*turns, user] if at else [dict(role="user", content=f"{text}\n\n{question}")]
            said, facts = client.chat(turns)
            turns.append(dict(role="assistant", content=said))
        else:
            said, facts = client.chat([*([stored] if stored else []), user], **more)
        right = METRICS["contains_any"](said, [answer])
        yield dict(side=side, text=number, question=at, right=right, said=said, **facts)


def checked(rows: list) -> None:
    """A side that shares reads little from its second request on; without recall all is read each time."""
    by = defaultdict(list)
    for row in rows:
        by[row["side"], row["text"]].append(row)
    for (side, text), each in by.items():
        known = side in ("never", "chat:never")
        assert all((row["cached"] > 0.9 * row["tokens"]) != known for row in each[1:]), (side, text)


def table(rows: list) -> None:
    sides = defaultdict(list)
    for row in rows:
        sides[row["side"]].append(row)
    full = {(row["text"], row["question"]): row["said"] for row in sides.get("full", ())}
    for side, each in sides.items():
        first, second, later = ([row for row in each if row["question"] in at] for at in ((0,), (1,), range(2, 99)))
        same = sum(row["said"] == full.get((row["text"], row["question"])) for row in each)
        line = f"{side:10} right {sum(row['right'] for row in each):.0f} of {len(each)}, as the full cache's {same}"
        for unit in (unit for unit in UNITS if unit in each[0]):
            one, two = (fmean(row[unit] for row in part) for part in (first, second))
            rest = median(row[unit] for row in later)
            last = fmean(row[unit] for row in each if row["question"] == max(r["question"] for r in each))
            line += f"\n    {unit:10} first {one:.2f}, second {two:.2f}, later {rest:.2f} ({rest / one:.3f}), "
            line += f"last {last:.2f} ({last / one:.3f})"
        print(line)


def lines(path: Path) -> list:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


if __name__ == "__main__":
    given = dict(sides=SIDES, texts=[0], budget=512, dtype="auto", table=False)
    args = arguments(__doc__, "out", model=None, haystack=None, **given)
    args.out = Path(args.out)
    if not args.table:
        torch.set_num_threads(1)
        Call.token = noting(Call.token)  # type: ignore[method-assign]
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        for number in args.texts:
            text, asked = text_of(tokenizer, args.haystack, number)
            for side in args.sides:
                if any((row["side"], row["text"]) == (side, number) for row in lines(args.out)):
                    continue
                made = list(answers(args, side, number, text, asked))
                with args.out.open("a") as out:
                    out.writelines(json.dumps(row) + "\n" for row in made)
                print(side, number, sum(row["right"] for row in made), flush=True)
    checked(lines(args.out))
    table(lines(args.out))
