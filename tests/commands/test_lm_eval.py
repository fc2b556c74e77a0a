"""lm-eval's model `kvevict`: scores and answers; with everything kept they equal those of lm-eval's `hf`. Then some of
lm-eval's tasks of long texts, on small local records in each data set's schema."""

import itertools
import json
import sys
import types
from pathlib import Path

import oracle
import pytest
import tiny
import torch

pytest.importorskip("lm_eval")

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows

import kvevict
from kvevict.lm_eval import KVEvict

CONTEXTS = ["The harbour opens at seven. " * 6, "The lantern is lit at nine. " * 5]
CHOICES = [" yes", " no", "!", " " + "why not, " * 5]
LONGEST = 120  # tokens: CONTEXTS[0] and the last choice do not fit


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder, _ = tiny.save(tmp_path_factory.mktemp("model"))
    tokenizer = tiny.byte_tokenizer()
    tokenizer.eos_token = "~"
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def no_report(monkeypatch):
    """Without the packages of `pip list` in every result; collecting them takes lm-eval seconds."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)


def asked(kind, arguments):
    return [Instance(kind, {}, each, at) for at, each in enumerate(arguments)]


def load(kind, folder, **options):
    return kind(pretrained=folder, dtype="float32", device="cpu", max_length=LONGEST, batch_size=1, **options)


def scores(model):
    pairs = [(context, choice) for choice in CHOICES for context in CONTEXTS]
    return model.loglikelihood(asked("loglikelihood", [*pairs, ("", "The")]), disable_tqdm=True)


def test_scores(folder):
    """With everything kept those of the unpatched model; the contexts that are too long are cut from the left as there.
    Then another number: slots were evicted."""
    want = scores(load(HFLM, folder))
    options = dict(policy="snapkv", window=4, chunk_size=16)
    whole = scores(load(KVEvict, folder, budget=4096, **options))
    assert [greedy for _, greedy in whole] == [greedy for _, greedy in want]
    assert [score for score, _ in whole] == pytest.approx([score for score, _ in want], rel=1e-5)
    some = scores(load(KVEvict, folder, budget=8, **options))
    assert max(abs(a[0] - b[0]) for a, b in zip(some, want, strict=True)) > 0.01


def test_answers(folder):
    options = {"until": ["\n"], "max_gen_toks": 6, "do_sample": False}
    requests = asked("generate_until", [(context[:100], options) for context in CONTEXTS])
    want = load(HFLM, folder).generate_until(requests, disable_tqdm=True)
    assert load(KVEvict, folder, policy="tova", budget=4096).generate_until(requests, disable_tqdm=True) == want


def test_mistakes(folder):
    with pytest.raises(ValueError, match="unknown policy 'tak'"):
        load(KVEvict, folder, policy="tak")
    with pytest.raises(ValueError, match="unknown argument 'wndow'; did you mean 'window'"):
        load(KVEvict, folder, policy="snapkv", wndow=3)
    text = asked("loglikelihood_rolling", [("text",)])
    with pytest.raises(ValueError, match="rolling log-likelihoods under eviction need a policy"):
        load(KVEvict, folder, policy="snapkv").loglikelihood_rolling(text)
    with pytest.raises(ValueError, match="rolling log-likelihoods: Probe rows know tokens after their chunk"):
        load(KVEvict, folder).loglikelihood_rolling(text)


def rolled(kind, folder, **options):
    texts = asked("loglikelihood_rolling", [(text,) for text in (*CONTEXTS, "short")])
    return load(kind, folder, **options).loglikelihood_rolling(texts, disable_tqdm=True)


def test_rolling_scores(folder):
    """With everything kept those of the unpatched model, also of a text of two windows; under eviction those of the
    float64 oracle, which reads each window in chunks."""
    want = rolled(HFLM, folder)
    assert rolled(KVEvict, folder, policy="h2o", budget=4096, chunk_size=16) == pytest.approx(want, rel=1e-5)
    net = load(HFLM, folder)
    for policy in ("h2o", "snapkv:window=4"):
        mine = rolled(KVEvict, folder, policy=policy, budget=12, chunk_size=16)
        for text, score, whole in zip((*CONTEXTS, "short"), mine, want, strict=True):
            total, ids = 0.0, net.tok_encode(text)
            for context, truth in get_rolling_token_windows(ids, net.prefix_token_id, LONGEST, 1):
                logits = oracle.Row(net.model, policy, 12, chunk_size=16).read(context)[-len(truth) :]
                total -= torch.nn.functional.cross_entropy(logits, torch.tensor(truth), reduction="sum").item()
            assert score == pytest.approx(total, rel=1e-5)
            assert (abs(score - whole) > 0.01) is (len(ids) > 12)


YAML = Path(lm_eval.__file__).parent / "tasks"
NEEDED = dict(longbench=("jieba", "fuzzywuzzy", "rouge"), ruler=("wonderwords", "nltk", "requests"))
RAIN = "Rain fell on the hills all day. "
CODES = dict(zip(["Naislet", "Orrin", "Fosk", "Grim", "Dorval", "Elms", "Cirrin"], range(364735, 1000000, 91011)))
FACTS = {name: f"The code of {name} is {code}." for name, code in CODES.items()}
ASKED = {name: f"What is the code of {name}?" for name in CODES}


def told(name):
    return f"{RAIN * 9}{FACTS[name]} {RAIN * 9}"


def of_longbench(answer="{}"):
    """Two records of LongBench, and the words that open their answers after lm-eval's prompt."""
    return dict(test=[
        dict(context=told(name), question=ASKED[name], answers=[answer.format(code) for code in (1, CODES[name])],
             all_classes=None, opening=f"The code of {name} is")
        for name in [*CODES][:2]
    ])  # fmt: skip


PROBLEMS = [dict(question=f"{FACTS[n]} {ASKED[n]}", answer=f"{FACTS[n]}\n#### {CODES[n]}") for n in CODES]
STORIES = [dict(input=told(name), question=ASKED[name], target=str(CODES[name])) for name in [*CODES][:2]]


MADE = [
    ("longbench/multifieldqa_en", of_longbench(), "qa_f1_score,none"),
    ("longbench/passage_retrieval_en", of_longbench("Paragraph {}"), "retrieval_score,none"),
    ("gsm8k/gsm8k", dict(train=PROBLEMS[2:], test=PROBLEMS[:2]), "exact_match,flexible-extract"),
    ("babilong/babilong_qa1", dict(qa1=STORIES), "acc,none"),
]


def needed(name):
    for package in NEEDED.get(name.split("/")[0], ()):
        pytest.importorskip(package, reason=f"lm-eval's {name} needs {package}")


@pytest.fixture(scope="module")
def models():
    """lm-eval's `hf`, `kvevict` with room for everything, and `kvevict` with little room."""
    own = dict(pretrained=kvevict.small_llama(), dtype="float32", device="cpu", batch_size=1)
    return (
        HFLM(**own), KVEvict(**own, budget=8192, chunk_size=256),
        KVEvict(**own, policy="streaming", budget=16, chunk_size=64),
    )  # fmt: skip


def local(name, records, folder, **changes):
    """lm-eval's task with the records of a file per split in place of its download."""
    needed(name)
    for split, rows in records.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    files = {split: str(folder / f"{split}.jsonl") for split in records}
    given = dict(include=f"{YAML / name}.yaml", dataset_path="json", dataset_name=None, custom_dataset=None,
                 dataset_kwargs=dict(data_files=files), **changes)  # fmt: skip
    (folder / "task.yaml").write_text(json.dumps(given))  # JSON is YAML
    return loaded(folder / "task.yaml")


def loaded(file, **metadata):
    manager = TaskManager(include_defaults=False, metadata=metadata)  # listing lm-eval's tasks takes a minute
    (task,) = manager.load(str(file))["tasks"].values()
    return task


def outcomes(task, model):
    """(metrics, answers) of a task's first two records."""
    none = TaskManager(include_defaults=False)
    found = lm_eval.simple_evaluate(model, tasks=[task], limit=2, gen_kwargs=dict(max_gen_toks=12), task_manager=none,
                                    bootstrap_iters=0)  # fmt: skip
    ((name, scores),) = found["results"].items()
    return ({key: score for key, score in scores.items() if "," in key and "stderr" not in key},
            [sample["resps"] for sample in found["samples"][name]])  # fmt: skip


def compared(task, models, metric):
    """The metric's value of `hf`; `kvevict` with everything kept has the same, and with few slots answers differ."""
    want, whole, few = (outcomes(task, model) for model in models)
    assert whole == want and set(few[0]) == set(want[0]) and few[1] != want[1]
    assert all(0 <= scores[metric] <= 1 for scores in (want[0], few[0]))
    return want[0][metric]


@pytest.mark.parametrize("name, records, metric", MADE, ids=[name for name, *_ in MADE])
def test_tasks(name, records, metric, models, tmp_path):
    opened = dict(gen_prefix="{{opening}}") if name.startswith("longbench") else {}
    assert compared(local(name, records, tmp_path, **opened), models, metric) > 0


def squad(count):
    """SQuAD's format: articles of five paragraphs."""
    numbers = iter(range(count))
    while group := [*itertools.islice(numbers, 5)]:
        yield dict(paragraphs=[
            dict(context=f"The code of Name{n} is {100 + n}. {RAIN}", qas=[
                dict(question=f"What is the code of Name{n}?", answers=[dict(text=str(100 + n))], is_impossible=False)
            ]) for n in group
        ])  # fmt: skip


@pytest.mark.slow
def test_ruler(models, monkeypatch):
    """lm-eval's RULER makes 500 prompts of a file that it downloads with `requests`."""
    needed("ruler/qa_squad")
    monkeypatch.delitem(sys.modules, "lm_eval.tasks.ruler.qa_utils", raising=False)  # it remembers its downloads
    content = dict(data=[*squad(500)])
    answer = types.SimpleNamespace(raise_for_status=lambda: None, json=lambda: content)
    monkeypatch.setattr("requests.get", lambda url, timeout: answer)
    task = loaded(YAML / "ruler/qa_squad.yaml", pretrained=kvevict.small_llama(), max_seq_lengths=[512])
    compared(task, models, "512,none")
