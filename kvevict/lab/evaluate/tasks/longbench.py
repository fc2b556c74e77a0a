"""The tasks of LongBench (Bai et al. 2024, arXiv 2308.14508): questions about documents, summaries, examples and code.
Prompts, answer lengths and metrics are those of lm-eval's tasks (`pip install 'lm_eval[longbench]'`).

    longbench         every task that has records in `settings.data`, with `settings.cases` records of each task
    longbench/NAME    the task NAME alone, for instance longbench/multi_news

`settings.data` is a file of records or a folder of such files (.jsonl, .jsonl.xz): LongBench's (`dataset`, `context`,
`input`, `answers`, `all_classes`), or MiniLongBench's (`task`, `prompt`, `gold`), whose prompts are complete. A prompt
of more than `settings.length` tokens loses the middle of its context, as in LongBench, and has the tag `cut`. The tag
`work` is a task's kind of work, a key of `WORK`, for tables with `--by work`.
"""

import ast
import functools
import importlib.util
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ....asking.prompts import ids_of
from ....policy.checks import installed
from .. import haystack
from ..metrics import METRICS
from . import TASKS, Case, TaskSettings

WORK = {
    "questions": ("narrativeqa", "qasper", "multifieldqa_en", "multifieldqa_zh"),
    "documents": ("hotpotqa", "2wikimqa", "musique", "dureader"),
    "summaries": ("gov_report", "qmsum", "multi_news", "vcsum"),
    "examples": ("trec", "triviaqa", "samsum", "lsht"),
    "synthetic": ("passage_count", "passage_retrieval_en", "passage_retrieval_zh"),
    "code": ("lcc", "repobench-p"),
}
WORK_OF = {name: work for work, names in WORK.items() for name in names}
PLAIN = ("examples", "code")  # kinds of work whose prompts LongBench leaves without a chat template
FIELDS = (("dataset", "context", "input", "answers"), ("task", "prompt", "gold"))


@functools.cache
def _official(name: str) -> dict[str, Any]:
    """Read lm-eval's settings of a task, of which `doc_to_text`, `generation_kwargs` and `process_results` are used."""
    import yaml

    class Loader(yaml.SafeLoader):
        """A YAML loader that reads the name of a function as text."""

    Loader.add_constructor("!function", lambda loader, node: node.value)
    return yaml.load((_folder() / f"{name}.yaml").read_text("utf-8"), Loader)


def _folder() -> Path:
    installed("longbench", "the task longbench", "lm_eval", "jieba", "fuzzywuzzy", "rouge")
    spec: Any = importlib.util.find_spec("lm_eval")
    return Path(spec.submodule_search_locations[0]) / "tasks/longbench"


@functools.cache
def _metrics() -> Any:
    """Import lm-eval's module with LongBench's metrics."""
    spec: Any = importlib.util.spec_from_file_location("kvevict_longbench_metrics", _folder() / "metrics.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def score(prediction: str, answers: Sequence[str], classes: Sequence[str] = (), *, name: str) -> float:
    """Compute LongBench's score of a prediction with lm-eval: the best over the answers. `classes` are all classes of a
    classification task; if empty, the answers are taken as the classes."""
    function = getattr(_metrics(), _official(name)["process_results"].removeprefix("metrics."))
    return float(function(dict(answers=answers, all_classes=classes or answers), [prediction])["score"])


@functools.lru_cache(maxsize=2)
def records(data: Path | None) -> tuple[dict[str, Any], ...]:
    """Read the records of a file or folder, as dicts of `task`, `before`, `context`, `after`, `answers` and `classes`.
    Raises ValueError for missing files, and for records that have the fields of neither format."""
    if data is None or not data.exists():
        raise ValueError(
            f"--data {data}: give a file or folder of LongBench's or MiniLongBench's records (.jsonl[.xz])"
        )
    files = sorted(file for file in data.glob("*.jsonl*")) if data.is_dir() else [data]
    found = tuple(_record(each, file) for file in files for each in haystack.records(file))
    if not found:
        raise ValueError(f"--data {data} has no records; give a file or folder of LongBench's records (.jsonl[.xz])")
    return found


def _record(each: Any, file: Path) -> dict[str, Any]:
    fields = next((names for names in FIELDS if all(name in each for name in names)), None)
    name = each[fields[0]] if fields else None
    if name not in WORK_OF:
        wanted = " or ".join(", ".join(names) for names in FIELDS)
        raise ValueError(f"--data {file}: a record lacks fields or is of another benchmark; wanted are {wanted}")
    before, _, after = _official(name)["doc_to_text"].partition("{{context}}")
    if fields == FIELDS[0]:
        context, after, answers = each["context"], after.replace("{{question}}", each["input"]), each["answers"]
    else:  # a complete prompt: its context ends at the last occurrence of the words between context and question
        words, prompt, answers = after.partition("{{question}}")[0], each["prompt"], each["gold"]
        before = before if prompt.startswith(before) else ""
        places = [prompt.rfind(each) for each in (words, "\n\nQuestion:") if each.strip()]
        end = next((place for place in places if place > len(before)), len(prompt))
        context, after = prompt[len(before) : end], prompt[end:]
    classes = each.get("all_classes")
    if isinstance(answers, dict):
        answers, classes = answers["answers"], answers["all_classes"]
    answers, classes = (ast.literal_eval(x) if isinstance(x, str) and x[:1] in "[N" else x for x in (answers, classes))
    answers, classes = (tuple(map(str, x or ())) for x in (answers, classes))
    return dict(task=name, before=before, context=context, after=after, answers=answers, classes=classes)


def cut(record: dict[str, Any], settings: TaskSettings) -> tuple[str, bool]:
    """Cut tokens out of the middle of a record's context until the prompt fits. Returns (the context, whether it was
    cut)."""
    ids = ids_of(settings.tokenizer, record["context"])
    room = settings.length - settings.tokens(record["before"]) - settings.tokens(record["after"])
    if len(ids) <= room:
        return record["context"], False
    if room < 2:
        raise ValueError(f"--lengths {settings.length} are too few for a prompt of {record['task']}; give more")
    first, last = (settings.tokenizer.decode(part) for part in (ids[: room // 2], ids[-(room // 2) :]))
    return first + last, True


def longbench(settings: TaskSettings, only: str | None = None) -> Iterator[Case]:
    task, taken = "longbench" + (f"/{only}" if only else ""), Counter[str]()
    for record in records(settings.data):
        name = record["task"]
        if only not in (None, name) or taken[name] == settings.cases:
            continue
        taken[name] += 1
        context, short = cut(record, settings)
        official = _official(name)["generation_kwargs"]
        tags = dict(length=settings.length, of=name, work=WORK_OF[name], cut=short, chat=WORK_OF[name] not in PLAIN)
        yield Case(
            task, f"{task}/{settings.length}/{name}/{taken[name]}", record["before"] + context, record["after"],
            record["answers"], f"longbench/{name}", official["max_gen_toks"], tags, one_line="\n" in official["until"],
            said=record["after"].strip(), classes=record["classes"],
        )  # fmt: skip
    if not taken:
        raise ValueError(f"--data {settings.data} has no record of {only}; leave the task out, or give other records")


TASKS.add("longbench")(longbench)
for _name in WORK_OF:
    TASKS.add(f"longbench/{_name}")(functools.partial(longbench, only=_name))
    METRICS.add(f"longbench/{_name}")(functools.partial(score, name=_name))
