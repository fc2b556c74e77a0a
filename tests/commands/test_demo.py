"""`kvevict demo` with a toy task and a tiny model; its answers with a full cache count as the truth."""

import builtins
import json

import pytest
import torch
from kept_page import data_of, opened
from tiny import byte_tokenizer, save

import kvevict
from kvevict.cli import main
from kvevict.lab.commands import demo
from kvevict.lab.evaluate.tasks import TASKS, Case

NEW = 6
QUESTION = "\n\nQuestion: What is it?\nAnswer: It is"


def answer(model, ids, policy=None):
    """Six bytes as text; `policy` is a name and its options, or the model runs as it is."""
    if policy is not None:
        with kvevict.evicting(model, policy[0], **policy[1]):
            return answer(model, ids)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
    return byte_tokenizer().decode(out[0, ids.shape[1] :])


def ids_of(context):
    return torch.tensor([byte_tokenizer()(context + QUESTION)["input_ids"]])


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """(folder, model, contexts): a task "facts" of random letters."""
    folder, model = save(tmp_path / "model", max_position_embeddings=200)
    contexts = []

    def facts(settings):
        for i in range(settings.cases):
            rng = settings.rng("toy", i)
            context = "".join(rng.choice("abc ") for _ in range(settings.length - len(QUESTION)))
            contexts.append(context)
            yield Case("facts", f"facts/{i}", context, QUESTION, (answer(model, ids_of(context)),), "exact", NEW)

    monkeypatch.setitem(TASKS, "facts", facts)
    return folder, model, contexts


def run(toy, tmp_path, *words):
    return main(["demo", "--model", toy[0], "--out", str(tmp_path / "out"), *words])


@pytest.mark.quick
def test_answers_and_costs(toy, tmp_path, capsys):
    options = dict(budget=24, chunk_size=40)
    policies = {"take:probe=8": ("take", options | dict(probe=8)), "streaming": ("streaming", options)}
    words = ["--policies", *policies, "--budget", "24", "--chunk-size", "40", "--cases", "3"]
    assert run(toy, tmp_path, *words) == 0
    out = capsys.readouterr().out
    line = json.loads(out.splitlines()[-1])
    _, model, contexts = toy
    prompt = 200 - demo.ANSWER
    truths = [answer(model, ids_of(context)) for context in contexts]
    assert line["runs"]["full cache"]["right"] == 3
    assert line["runs"]["full cache"]["cache_bytes"] == 2 * 4 * 32 * 2 * 4 * prompt
    for name, policy in policies.items():
        said = [answer(model, ids_of(context), policy) for context in contexts]
        found = line["runs"][name]
        assert found["right"] == sum(a.strip() == b.strip() for a, b in zip(said, truths))
        assert found["slots"] == "24" and found["cache_bytes"] == 2 * 4 * 32 * 2 * 4 * 24
    asked = [text for text in out.splitlines() if text.startswith("What is it?")]
    assert [text.count("✓") for text in asked] == [
        1 + sum(answer(model, ids_of(context), policy).strip() == truth.strip() for policy in policies.values())
        for context, truth in zip(contexts, truths)
    ]


def test_the_page_is_of_a_case_that_the_runs_disagree_about(toy, tmp_path, capsys):
    assert run(toy, tmp_path, "--policies", "streaming", "--budget", "12", "--chunk-size", "40", "--cases", "2") == 0
    _, model, contexts = toy
    data = data_of((tmp_path / "out" / "kept.html").read_text(encoding="utf-8"))
    policy = "streaming", dict(budget=12, chunk_size=40)
    lost = [answer(model, ids_of(c), policy).strip() != answer(model, ids_of(c)).strip() for c in contexts]
    assert any(lost)
    assert "".join(text for text, _ in data["pieces"]) == contexts[lost.index(True)] + QUESTION
    assert data["runs"][0]["answer"].startswith("✗")
    prompt = 200 - demo.ANSWER
    kept = [0, 1, 2, 3, *range(prompt - 8, prompt)]
    assert all(opened(head) == kept for heads in data["runs"][0]["kept"] for head in heads)


def test_without_matplotlib(toy, tmp_path, capsys, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **options):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    assert run(toy, tmp_path, "--policies", "streaming", "--budget", "12", "--chunk-size", "40", "--cases", "1") == 0
    out = capsys.readouterr().out
    assert "pip install 'kvevict[plot]'" in out
    assert json.loads(out.splitlines()[-1])["files"] == [str(tmp_path / "out" / "kept.html")]


def test_with_matplotlib(toy, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert run(toy, tmp_path, "--policies", "streaming", "--budget", "12", "--chunk-size", "40", "--cases", "1") == 0
    assert (tmp_path / "out" / "kept.png").read_bytes().startswith(b"\x89PNG")


def test_mistakes(toy, tmp_path, capsys):
    for words, message in [("--cases 0", "--cases"), ("--budget 3.5", "budget"), ("--policies snapvk", "snapkv")]:
        assert run(toy, tmp_path, *words.split()) == 2
        assert message in capsys.readouterr().err
