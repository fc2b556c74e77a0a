"""GSM8K (arXiv 2110.14168), many-shot: `gsm8k` fills the context with worked examples and asks one problem more.

`settings.data` is a folder with train.jsonl and test.jsonl of openai/grade-school-math (one record a line: question,
answer, which ends with "#### NUMBER").
"""

from ..data import drawn, files, read_jsonl
from ..haystack import most
from . import TASKS, Case, opening

NEW_TOKENS = 300  # 99 % of the training set's worked answers take fewer


@TASKS.add("gsm8k")
def gsm8k(settings):
    """As many random examples of the training set as fit, then a problem of the test set."""
    origin = "grade_school_math/data of the repository openai/grade-school-math"
    paths = [files(settings, "gsm8k", origin, name)[0] for name in ("train.jsonl", "test.jsonl")]
    train, test = map(read_jsonl, paths)
    for i, (place, record) in enumerate(drawn(settings, "gsm8k", test)):
        shots = settings.rng("gsm8k", i).sample(train, len(train))
        yield many_shot(settings, f"gsm8k/{settings.length}/{place}", shots, record)


def many_shot(settings, id: str, shots: list[dict], record: dict) -> Case:
    question = f"Question: {record['question']}\nAnswer:"

    def context(n):
        return "".join(f"Question: {r['question']}\nAnswer: {r['answer']}\n\n" for r in shots[:n])

    def fits(n):
        return n <= len(shots) and settings.tokens(context(n) + question) <= settings.length

    if not (n := most(fits, settings.length // 200)):
        raise ValueError(f"length: {settings.length} tokens are too few for an example and a problem; give more")
    answer = record["answer"].rpartition("####")[2].strip()
    tags = {"length": settings.length, "shots": n}
    return Case("gsm8k", id, context(n), question, (answer,), "accuracy_number", NEW_TOKENS, tags, opening(question))
