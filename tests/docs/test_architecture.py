"""docs/architecture.md: its worked examples run, its tree has every file, and calls take the way that it lists."""

import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch

import kvevict
from kvevict.engine.measure.quantities import per_head
from kvevict.engine.memory.carried import join
from kvevict.policy.building import build
from kvevict.policy.policy import Policy
from kvevict.policy.rows import AppendedRows

PAGE = (Path(__file__).parents[2] / "docs/architecture.md").read_text()
PACKAGE = Path(kvevict.__file__).parent
SKIPPED = "__init__.py", "__pycache__"
ENGINE, SEEN = PACKAGE / "engine", PACKAGE / "policy/seen"


def test_the_tree():
    """Every file of the engine has one line in the tree, in its room if it has one, with a comment."""
    (tree,) = re.findall(r"^engine/\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    files, room = [], ""
    for name, comment in (line.split(maxsplit=1) for line in tree.splitlines()):
        assert comment
        if name.endswith("/") and name != "quantities/":
            room = name
        else:
            files.append(room + name.rstrip("/"))
    there = [path for path in [*ENGINE.glob("*.py"), *ENGINE.glob("*/*")] if path.name not in SKIPPED]
    assert sorted(files) == sorted(path.relative_to(ENGINE).as_posix() for path in there)


def listed(heading):
    """(file, function) of a numbered list of the page."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"^\d+\. `(.*?)`, `(.*?)`", section, re.MULTILINE)


def walked(call):
    """(file, function) of the engine's functions, and of what a policy sees, in the order of a call's first entries."""
    entered: dict = {}

    def profile(frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == "call" and (ENGINE in path.parents or SEEN in path.parents):
            base = ENGINE if ENGINE in path.parents else PACKAGE
            entered.setdefault((path.relative_to(base).as_posix(), frame.f_code.co_name))

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)
    return list(entered)


def test_the_life_of_a_token():
    """A prompt that is evicted from, and a token decoded after it, enter the listed functions in the listed order."""
    model, prompt = tiny.model(), tiny.prompt(1, 90)
    kvevict.patch(model, "snapkv", budget=40, chunk_size=32)
    caches = []
    with torch.no_grad():
        read = walked(lambda: caches.append(model(**prompt, logits_to_keep=1).past_key_values))
        decoded = walked(lambda: model(input_ids=torch.tensor([[3]]), past_key_values=caches[0]))
    ways = {"The life of a prompt": read, "The walk of a query": read, "The life of a decoded token": decoded}
    for heading, way in ways.items():
        steps = listed(heading)
        assert len(steps) > 5
        assert [step for step in way if step in steps] == steps


@pytest.fixture
def example(request):
    """The registrations of a snippet of the page, removed afterwards."""
    registries = kvevict.SCORES, kvevict.ROWS, kvevict.QUANTITIES
    before = [dict(registry) for registry in registries]
    snippets = re.findall(r"^```python example\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    (source,) = [each for each in snippets if request.param in each]
    names = dict(kvevict=kvevict, dataclass=dataclass, per_head=per_head, torch=torch, np=np, AppendedRows=AppendedRows)
    exec(compile(source, "docs/architecture.md", "exec"), names)
    yield names
    for registry, old in zip(registries, before, strict=True):
        registry.clear()
        registry.update(old)


@pytest.mark.parametrize("example", ["register_quantity"], indirect=True)
def test_a_score_on_a_new_quantity(example):
    """It keeps the slots of its formula, computed from the model's values."""
    model, inputs = tiny.model(), tiny.prompt(1, 40)
    kvevict.patch(model, "snapkv", score="outlying", rows="window", window=4, budget=12)
    seen = {}
    score = example["Outlying"].score

    def note(self, slots, attention, value_range):
        v = slots.kv.v[0].double()
        torch.testing.assert_close(value_range[0].double(), v.amax(-1) - v.amin(-1))
        seen[slots.index] = attention * value_range
        return score(self, slots, attention, value_range)

    example["Outlying"].score = note
    tiny.generate(model, inputs, new=1)
    kept = kvevict.report(model, positions=True)["positions"]
    for layer, numbers in seen.items():
        for head, ours in zip(numbers[0], kept[layer][0], strict=True):
            assert ours == [*sorted(head[:36].topk(8).indices.tolist()), 36, 37, 38, 39]
    policy = build("snapkv", score="outlying", budget=20)
    assert Policy.from_json(policy.to_json()) == policy


@pytest.mark.parametrize("example", ["register_rows"], indirect=True)
def test_rows_that_depend_on_the_chunk(example):
    """A copy of its first tokens follows every chunk, at the positions after it; the copies are not stored."""
    model, inputs = tiny.model(), tiny.prompt(1, 50)
    calls = []
    model.model.embed_tokens.register_forward_pre_hook(lambda _, args: calls.append(args[0][0].tolist()))
    kvevict.patch(model, "snapkv", rows="again", tokens=4, chunk_size=16, budget=12)
    with torch.no_grad():
        cache = model(**inputs, logits_to_keep=1).past_key_values
    ids = inputs["input_ids"][0].tolist()
    want = [ids[a:b] + ids[a : min(a + 4, b)] for a, b in ((0, 2), (2, 18), (18, 34), (34, 50))]
    assert calls == want
    assert cache.get_seq_length() == 50
    assert all(max(map(max, row)) < 50 for layer in kvevict.report(model, positions=True)["positions"] for row in layer)


def test_carried_numbers_are_a_choice():
    """Old slots get their number by `carry`, new ones their score; h2o is summed attention."""
    new, carried = torch.tensor([[[1.0, 5, 2, 7]]]), torch.tensor([[[4.0, 3]]])
    by_hand = dict(sum=[5.0, 8, 2, 7], max=[4.0, 5, 2, 7], keep=[4.0, 3, 2, 7])
    assert {carry: join(carry, new, carried)[0, 0].tolist() for carry in by_hand} == by_hand
    assert join("none", new, carried) is None and join("keep", new, None) is new
    kept = {}
    for name, options in {"none": {}, "sum": dict(carry="sum"), "keep": dict(carry="keep"), "h2o": {}}.items():
        score = "h2o" if name == "h2o" else "snapkv"
        policy = build("snapkv", score=score, rows="all", budget=12, chunk_size=16, **options)
        policy = replace(policy, score=type(policy.score)(**(dict(recent=0) if name == "h2o" else dict(pool="none"))))
        with kvevict.evicting(tiny.shared(), policy):
            tiny.generate(tiny.shared(), tiny.prompt(1, 90), new=1)
            kept[name] = kvevict.report(tiny.shared(), positions=True)["positions"]
    assert kept["sum"] == kept["h2o"] and kept["none"] != kept["sum"] != kept["keep"] != kept["none"]


def test_a_quantity_that_does_not_exist():
    with pytest.raises(ValueError, match="unknown quantity 'atention'; did you mean 'attention'"):

        @kvevict.register_score("wrong")
        @dataclass(frozen=True)
        class Wrong(kvevict.Score):
            needs = ("atention",)

    assert "wrong" not in kvevict.SCORES
