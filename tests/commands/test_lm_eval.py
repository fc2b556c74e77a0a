"""lm-eval's model `kvevict`: scores and answers, with everything kept those of lm-eval's own `hf`."""

import json

import pytest
import tiny

pytest.importorskip("lm_eval")

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

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


def test_task(folder, tmp_path):
    """A task of a file, by lm-eval's own evaluation."""
    data = tmp_path / "data.jsonl"
    asked = [dict(text=CONTEXTS[i % 2][: 90 + i] + "Opens at", choices=CHOICES[:3], gold=i % 3) for i in range(4)]
    data.write_text("".join(json.dumps(each) + "\n" for each in asked))
    task = dict(
        task="harbour", dataset_path="json", dataset_kwargs=dict(data_files=dict(test=str(data))), test_split="test",
        output_type="multiple_choice", doc_to_text="{{text}}", doc_to_choice="{{choices}}", doc_to_target="{{gold}}",
        metric_list=[dict(metric="acc")], target_delimiter="",
    )  # fmt: skip

    none = TaskManager(include_path=str(tmp_path), include_defaults=False)  # the others take a minute to list

    def scored(model, **more):
        given = dict(pretrained=folder, dtype="float32", **more)
        found = lm_eval.simple_evaluate(model, given, tasks=[task], device="cpu", bootstrap_iters=0, task_manager=none)
        return [answer[0] for each in found["samples"]["harbour"] for answer in each["filtered_resps"]]

    want = scored("hf")
    assert len(want) == 12 and scored("kvevict", policy="snapkv", budget=4096) == pytest.approx(want, rel=1e-5)


def test_mistakes(folder):
    with pytest.raises(ValueError, match="unknown policy 'tak'"):
        load(KVEvict, folder, policy="tak")
    with pytest.raises(ValueError, match="unknown argument 'wndow'; did you mean 'window'"):
        load(KVEvict, folder, policy="snapkv", wndow=3)
    with pytest.raises(ValueError, match="rolling log-likelihoods"):
        load(KVEvict, folder).loglikelihood_rolling(asked("loglikelihood_rolling", [("text",)]))
