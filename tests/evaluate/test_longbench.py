"""LongBench's records as tasks: prompts, cuts and scores; lm-eval's own files where it is installed."""

import json
import lzma

import pytest
from tiny import model
from toy_task import tokenizer

from kvevict.lab.evaluate.metrics import METRICS
from kvevict.lab.evaluate.results import read
from kvevict.lab.evaluate.run import Evaluation, evaluate
from kvevict.lab.evaluate.tasks import TASKS, TaskSettings, longbench

YAML = """dataset_name: x
doc_to_text: "{text}"
process_results: !function metrics.get_{metric}
generation_kwargs: {{max_gen_toks: 5, until: [{until}]}}
"""
METRIC = """def get_length(doc, results):
    return {"score": len(results[0]) / max(map(len, doc["answers"]))}

def get_class(doc, results):
    named = [each for each in doc["all_classes"] if each in results[0]]
    return {"score": (doc["answers"][0] in named) / max(len(named), 1)}
"""
TEXT = "the rain fell. " * 12
NEWS = dict(dataset="multi_news", context=TEXT, input="", answers="['it rained', 'rain']", all_classes="None")
TREC = dict(
    task="trec", prompt="kinds: a b\n" + TEXT + "\nwhat?\n", gold=dict(answers=["abc"], all_classes=["abc", "de"])
)
HOTPOT = dict(task="hotpotqa", prompt=f"read {TEXT}\n\nsay: who?\nAnswer:", gold=["bad", "hat"])


@pytest.fixture
def records(tmp_path, monkeypatch):
    """A file of three records, and settings and metrics of their tasks in place of lm-eval's."""
    official = dict(
        multi_news=("news: {{context}} sum up:", "length", ""),
        trec=("kinds: {{context}}\\n{{question}}", "class", '"\\n"'),
        hotpotqa=("read {{context}}\\n\\nsay: {{question}}\\nAnswer:", "length", ""),
    )  # fmt: skip
    for name, (text, metric, until) in official.items():
        (tmp_path / f"{name}.yaml").write_text(YAML.format(text=text, metric=metric, until=until))
    (tmp_path / "metrics.py").write_text(METRIC)
    monkeypatch.setattr(longbench, "_folder", lambda: tmp_path)
    for cached in (longbench._official, longbench._metrics, longbench.records):
        cached.cache_clear()
    yield of(tmp_path / "records.jsonl", NEWS, TREC, HOTPOT)
    for cached in (longbench._official, longbench._metrics, longbench.records):
        cached.cache_clear()


def of(path, *records):
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def test_records(records):
    cases = {case.tags["of"]: case for case in TASKS["longbench"](TaskSettings(tokenizer(), 400, 2, data=records))}
    news, trec, hotpot = (cases[name] for name in ("multi_news", "trec", "hotpotqa"))
    assert news.context + news.question == f"news: {TEXT} sum up:" and news.answers == ("it rained", "rain")
    assert trec.context + trec.question == TREC["prompt"] and trec.answers == ("abc",)
    assert hotpot.context == f"read {TEXT}" and hotpot.question == "\n\nsay: who?\nAnswer:"
    assert [case.tags["work"] for case in cases.values()] == ["summaries", "examples", "documents"]
    assert [case.tags["chat"] for case in cases.values()] == [True, False, True]
    assert [case.one_line for case in cases.values()] == [False, True, False]
    assert METRICS[news.metric]("abc", news.answers) == 3 / 9
    assert trec.classes == ("abc", "de")
    assert [METRICS[trec.metric](said, trec.answers, trec.classes) for said in ("abc", "abc de", "de")] == [1, 0.5, 0]
    (only,) = TASKS["longbench/trec"](TaskSettings(tokenizer(), 400, 2, data=records))
    assert only.task == "longbench/trec" and only.answers == trec.answers


def test_examples_that_begin_with_a_question_are_context(records, tmp_path):
    prompt = f"kinds: \n\nQuestion: {TEXT}"
    asked = of(tmp_path / "asked.jsonl", TREC | dict(prompt=prompt))
    (case,) = TASKS["longbench/trec"](TaskSettings(tokenizer(), 100, 1, data=asked))
    assert case.tags["cut"] and case.question == "" and case.context.startswith("kinds: \n\nQuestion: the")


def test_the_middle_of_a_long_prompt_is_cut(records):
    settings = TaskSettings(tokenizer(), 100, 1, data=records)
    for case in TASKS["longbench"](settings):
        assert case.tags["cut"] and settings.tokens(case.context + case.question) in (99, 100)
    start, end = news_parts = case.context.removeprefix("read ")[:30], case.context[-30:]
    assert TEXT.startswith(start) and TEXT.endswith(end) and all(news_parts)


def test_an_evaluation(records, tmp_path):
    """Of each run a line per record; the full cache's answers are fed to a policy by fidelity/longbench."""
    out, tasks = tmp_path / "out.jsonl", ("longbench", "fidelity/longbench")
    plan = Evaluation(tasks, (60,), ("snapkv",), (16,), modes=("known",), cases=1, data=str(records))
    evaluate(model(), tokenizer(), plan, out)
    lines = read(out)[1]
    assert len(lines) == 12 and {line["tags"]["work"] for line in lines} == {"summaries", "examples", "documents"}
    assert all(0 <= line["same"] <= 1 for line in lines if line["task"].startswith("fidelity"))


@pytest.mark.parametrize("record, said", [
    (dict(task="trec", prompt="who?"), "a record lacks fields"), (dict(NEWS, dataset="other"), "another benchmark"),
])  # fmt: skip
def test_other_records(record, said, records, tmp_path):
    with pytest.raises(ValueError, match=said):
        list(TASKS["longbench"](TaskSettings(tokenizer(), 100, 1, data=of(tmp_path / "wrong.jsonl", record))))


@pytest.mark.parametrize("name, data, said", [
    ("latin.jsonl", b'{"task": "caf\xe9"}', "byte 13 is not UTF-8"),
    ("text.jsonl", b"it rained", "a line that is not JSON"),
    ("cut.jsonl.xz", lzma.compress(b"{}")[:-9], "not an intact .xz file"),
])  # fmt: skip
def test_damaged_files(name, data, said, tmp_path):
    """The error names the file, and is one sentence."""
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(ValueError, match=said) as caught:
        list(TASKS["longbench"](TaskSettings(tokenizer(), 100, 1, data=path)))
    assert str(caught.value).startswith(str(path)) and "; give" in str(caught.value)


def test_what_does_not_fit(records, tmp_path):
    with pytest.raises(ValueError, match="--lengths 10 are too few for a prompt of multi_news"):
        list(TASKS["longbench"](TaskSettings(tokenizer(), 10, 1, data=records)))
    with pytest.raises(ValueError, match="has no record of lcc"):
        list(TASKS["longbench/lcc"](TaskSettings(tokenizer(), 100, 1, data=records)))
    with pytest.raises(ValueError, match="give a file or folder of LongBench's"):
        list(TASKS["longbench"](TaskSettings(tokenizer(), 100, 1, data=tmp_path / "none")))


def test_lm_evals_files():
    """Every task has a prompt, a length and a metric, by which a right answer has the full score."""
    pytest.importorskip("lm_eval")
    for package in ("jieba", "fuzzywuzzy", "rouge"):
        pytest.importorskip(package)
    for name in longbench.WORK_OF:
        official = longbench._official(name)
        assert "{{context}}" in official["doc_to_text"] and official["generation_kwargs"]["max_gen_toks"] > 0
        right = dict(passage_count="7", passage_retrieval_en="Paragraph 3", passage_retrieval_zh="段落3").get(
            name, "rain fell"
        )
        assert METRICS[f"longbench/{name}"](right, (right,)) > 0.99
        assert METRICS[f"longbench/{name}"]("z", (right,)) < 0.2
