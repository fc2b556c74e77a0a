"""RULER's questions about documents: SQuAD ("ruler/qa_1") and HotpotQA ("ruler/qa_2"), among as many others as fit."""

import functools
import json
from pathlib import Path

from ..haystack import growing
from .ruler import PROMPTS, fill, register, shuffled

FILES = {"squad.json": "SQuAD's dev-v2.0.json", "hotpotqa.json": "HotpotQA's hotpot_dev_distractor_v1.json"}


def qa(settings, rng, room, i, file):
    """The i-th question of a random order; its documents, for SQuAD then its article's others, then any."""
    questions, documents = read(file, settings.data and Path(settings.data))
    at = settings.rng(file).sample(range(len(questions)), len(questions))[i % len(questions)]
    query, answers, own, near = questions[at]
    first = [*own, *rng.sample(near, len(near))]
    rest = sorted(set(range(len(documents))) - set(first))
    take, seed = growing(iter([*first, *rng.sample(rest, len(rest))])), rng.random()

    def body(n):
        return "\n\n".join(f"Document {k}:\n{documents[j]}" for k, j in enumerate(shuffled(take(n), seed), 1))

    before, after = PROMPTS["qa"][0], PROMPTS["qa"][1].format(query=query)
    return before + fill(settings, room, before, body, after, len(own), len(documents)), after, answers


@functools.lru_cache(maxsize=2)
def read(file: str, data: Path | None):
    """[(question, answers, its documents' indices, its article's other documents' indices)], documents."""
    path = (data or Path()) / file
    if data is None or not path.is_file():
        raise ValueError(f"data: there is no {path}; give a folder with {FILES[file]} in it as {file}")
    try:
        parse = squad if file == "squad.json" else hotpotqa
        questions, documents = parse(json.loads(path.read_text(encoding="utf-8")))
        if not questions:
            raise ValueError("no questions")
        return questions, documents
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"data: {path} is not {FILES[file]} ({error!r}); put that there") from None


def squad(content: dict):
    index, questions = {}, []
    for article in content["data"]:
        inside = [index.setdefault(p["context"], len(index)) for p in article["paragraphs"]]
        for own, paragraph in zip(inside, article["paragraphs"]):
            near = sorted(set(inside) - {own})
            for asked in paragraph["qas"]:
                if not asked["is_impossible"]:
                    answers = list(dict.fromkeys(answer["text"] for answer in asked["answers"]))
                    questions.append((asked["question"], answers, [own], near))
    return questions, list(index)


def hotpotqa(content: list):
    index, questions = {}, []
    for asked in content:
        own = [index.setdefault(f"{title}\n{''.join(lines)}", len(index)) for title, lines in asked["context"]]
        questions.append((asked["question"], [asked["answer"]], list(dict.fromkeys(own)), []))
    return questions, list(index)


register("qa_1", "qa", qa, metric="contains_any", file="squad.json")
register("qa_2", "qa", qa, metric="contains_any", file="hotpotqa.json")
