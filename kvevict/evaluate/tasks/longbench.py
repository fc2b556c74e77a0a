"""LongBench (arXiv 2308.14508): `longbench/<dataset>` with the official prompts, truncation, metrics, answer lengths.

`settings.data` is a folder with `<dataset>.jsonl` (one record a line: input, context, answers, all_classes), and
dataset2prompt.json and dataset2maxlen.json of the repository's LongBench/config. Without a folder they are downloaded.

The prompt is split where the context ends: what a template says after it is the question, what it says before stays in
the context. The official scripts put no chat template around the few-shot and code datasets: tags["chat"] is False for
these. They also end samsum's answers at the first newline; its metric reads the first line alone.
"""

import functools
import json
import zipfile
from pathlib import Path

from ..data import drawn, files, read_jsonl
from ..download import Changed, of_hub, of_web
from . import TASKS, Case

METRIC = {
    **dict.fromkeys(("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique"), "f1"),
    **dict.fromkeys(("gov_report", "qmsum", "multi_news"), "rouge_l"),
    **dict.fromkeys(("dureader", "vcsum"), "rouge_l_zh"),
    **dict.fromkeys(("trec", "lsht"), "classification"),
    **dict.fromkeys(("lcc", "repobench-p"), "code_sim"),
    **{"multifieldqa_zh": "f1_zh", "triviaqa": "f1_line", "samsum": "rouge_l_line"},
    **{"passage_count": "count", "passage_retrieval_en": "retrieval", "passage_retrieval_zh": "retrieval_zh"},
}
NO_CHAT = ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p")
PROMPTS, LENGTHS = "dataset2prompt.json", "dataset2maxlen.json"
ORIGIN = f"the hub's dataset THUDM/LongBench, and {PROMPTS} and {LENGTHS} of the repository THUDM/LongBench"
CONFIG = "https://raw.githubusercontent.com/THUDM/LongBench/c5ea10bcd06285223c58dfed76bbc92d22273709/LongBench/config/"
SHA256 = {
    PROMPTS: "56d22ad4f382169c2b8a11ff4c982a4a1bea096c8152b0f0b85b64686b157c30",
    LENGTHS: "72966b3c0933e214591637fb085798c5e687ebff4ddaab5d99bbc31120532022",
}
DATA = ("THUDM/LongBench", "data.zip", "4a90f81c8db79f60c15f77dcd207a1099038c775")  # the last commit that changed it


@functools.lru_cache(maxsize=1)
def download() -> tuple[str, dict, dict]:
    """The hub's data.zip (in its cache), and the templates and the answer lengths by dataset, each as it is pinned."""
    try:
        return of_hub(*DATA), *(json.loads(of_web(CONFIG + name, sha256)) for name, sha256 in SHA256.items())
    except Changed as error:
        raise ValueError(f"data: {error}; or give a folder that holds the unpacked data.zip of {ORIGIN}") from None
    except Exception as error:  # the hub's own kinds of errors are many, and all mean the same here
        raise ValueError(
            f"data: LongBench could not be downloaded ({type(error).__name__}: {error}); give a folder that holds the "
            f"unpacked data.zip of {ORIGIN}"
        ) from None


def load(settings, dataset: str) -> tuple[list[dict], str, int]:
    """Records, template and new tokens of a dataset."""
    if settings.data is None:
        archive, prompts, lengths = download()
        records: Path | zipfile.Path = zipfile.Path(archive, f"data/{dataset}.jsonl")
    else:
        names = f"{dataset}.jsonl", PROMPTS, LENGTHS
        records, *tables = (files(settings, f"longbench/{dataset}", ORIGIN, name)[0] for name in names)
        prompts, lengths = (json.loads(table.read_text("utf-8")) for table in tables)
    if dataset not in prompts or dataset not in lengths:
        raise ValueError(f"data: {PROMPTS} or {LENGTHS} in {settings.data} lacks {dataset}; give the official ones")
    return read_jsonl(records), prompts[dataset], lengths[dataset]


def fill(template: str, record: dict) -> tuple[str, str]:
    """The official prompt as (up to the context's end, the rest)."""
    before, _, after = template.partition("{context}")
    return before.format(**record) + record["context"], after.format(**record)


def truncate(tokenizer, context: str, question: str, limit: int) -> tuple[str, str]:
    """The first and the last half of `limit` tokens of context + question, where they are more.

    Where the second half does not hold the whole question, all of it is the question."""
    ids = tokenizer(context + question, add_special_tokens=False)["input_ids"]
    if len(ids) <= limit:
        return context, question
    halves = ids[: limit // 2], ids[-(limit // 2) :]
    first, last = (tokenizer.decode(half, skip_special_tokens=True) for half in halves)
    if last.endswith(question):
        return first + last.removesuffix(question), question
    return first, last


def cases(dataset: str, settings):
    """LongBench's records in random order; prompts of more than `length` - new tokens lose their middle."""
    name = f"longbench/{dataset}"
    records, template, new_tokens = load(settings, dataset)
    if settings.length < 2 * new_tokens:
        raise ValueError(f"length: {name} generates {new_tokens} tokens; give at least {2 * new_tokens}")
    for place, record in drawn(settings, name, records):
        whole = fill(template, record)
        context, question = truncate(settings.tokenizer, *whole, settings.length - new_tokens)
        answers, classes = record["answers"], record.get("all_classes") or ()
        if METRIC[dataset] == "classification":
            answers = [answers[0], *(c for c in classes if c not in answers)]
        id, tags = f"{name}/{settings.length}/{place}", {"length": settings.length}
        if dataset in NO_CHAT:
            tags["chat"] = False
        yield Case(name, id, context, question, tuple(answers), METRIC[dataset], new_tokens, tags)


for _dataset in METRIC:
    TASKS.add(f"longbench/{_dataset}")(functools.partial(cases, _dataset))
