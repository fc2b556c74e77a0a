"""Names: parts of one's own, old option names, and what is said of wrong ones."""

import json
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import tiny
import torch

import kvevict
from kvevict.engine.observation import Observation
from kvevict.policy import PARTS, Policy, build


@pytest.mark.parametrize(
    "old, new",
    [
        (("snapkv", dict(error="caote")), ("snapkv", dict(refine="caote"))),
        (("snapkv+caote", dict(rows="each")), ("snapkv+caote", dict(weights="each"))),
        (("take", dict(alpha=0.32)), ("take", dict(ema_alpha=0.32))),
        (("take", dict(probe_positions="true")), ("take", dict(place="true"))),
        (("oracle", dict(response=(1, 2))), ("oracle", dict(ids=(1, 2)))),
        (("vatp", dict(base="snapkv", window=8)), ("vatp", dict(score="paasvn", window=8))),
        (("vatp", dict(base="h2o")), ("vatp", {})),
    ],
)
def test_old_options_work_with_one_warning(old, new):
    with pytest.warns(FutureWarning) as said:
        policy = build(old[0], budget=64, **old[1])
    assert policy == build(new[0], budget=64, **new[1])
    assert len(said) == 1 and next(iter(new[1]), "score") in str(said[0].message)


def test_a_policy_s_first_argument_is_its_score():
    assert Policy("knorm", budget=64) == Policy(score="knorm", budget=64)


OLD_JSON = {
    "take": ({"name": "take", "probe": 16, "alpha": 0.3, "probe_positions": "true", "append": True, "kernel": 9},
             dict(probe=16, ema_alpha=0.3, place="true", kernel=9)),
    "snapkv": ({"name": "snapkv", "window": 8, "reduce": "mean"}, dict(window=8, reduce="mean")),
    "oracle": ({"name": "oracle", "response": [4, 5]}, dict(ids=(4, 5))),
    "laq": ({"name": "laq", "n_d": 4, "window": 8, "reduce": "max"}, dict(n_d=4, window=8, reduce="max", group="max")),
    "paasvn": ({"name": "vatp", "base": "snapkv", "sink": 2, "recent": None, "window": 8},
               dict(heads="equal", sink=2, window=8)),
    "fastkv": ({"name": "fastkv", "window": 4, "tsp": 1, "tsp_len": 100}, dict(window=4, tsp=1, tsp_len=100)),
    "streaming": ({"name": "streaming", "sink": 2, "rerotate": True}, dict(sink=2, rerotate=True)),
}  # fmt: skip


@pytest.mark.parametrize("preset", OLD_JSON)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_old_json_is_read(preset):
    score, options = OLD_JSON[preset]
    text = json.dumps({"score": score, "error": {"name": "none"}, "budget": 128, "schedule": "prompt"})
    want = build(preset, budget=128, schedule="prompt", warmup_layers=None, **options)
    assert Policy.from_json(text) == replace(want, chunk_size=None)


def test_errors_is_an_old_name():
    with pytest.warns(FutureWarning, match="REFINEMENTS"):
        assert kvevict.ERRORS is kvevict.REFINEMENTS


def test_no_option_has_two_meanings():
    """An option by keyword goes to one part; `per_head` goes to two, and means the same."""
    seen = {}
    for kind, (registry, _) in PARTS.items():
        for part in registry.values():
            for field in fields(part):
                seen.setdefault(field.name, set()).add(kind)
    policy = {f.name for f in fields(Policy)}
    assert {name for name, kinds in seen.items() if len(kinds) > 1 or name in policy} == {"per_head"}


@pytest.mark.parametrize(
    "policy, options, message",
    [
        ("take", dict(rows="prob"), "unknown rows 'prob'; did you mean 'probe'"),
        ("take", dict(rows=3), "rows must be a name or a kvevict Rows"),
        ("edie", dict(rows="probe", chunk_size=32), "chunk_size=32 must be greater than the probe's 32 tokens"),
        ("snapkv", dict(rows="given"), "needs ids="),
        ("snapkv", dict(rows="given", ids=(3, -1)), "ids must be a tuple of token ids"),
        ("snapkv", dict(rows="drafted", chunk_size=64, schedule="chunk"), "a draft needs the whole prompt"),
        ("h2o", dict(rows="drafted"), "sums over every chunk"),
        ("snapkv", dict(rows="none"), "rows='none' has none"),
        ("snapkv", dict(rows="probe", window=8), "unknown option 'window'"),
        ("snapkv", dict(group="median"), "unknown group 'median'"),
        ("snapkv", dict(sink=-1), "sink must be at least 0"),
        ("snapkv", dict(rows="drafted", draft_model=None), "needs a smaller model"),
        ("laq", dict(tsp=1), "a draft comes after all layers"),
    ],
)
def test_mistakes(policy, options, message):
    model = tiny.model()
    with pytest.raises((ValueError, TypeError), match=message):
        kvevict.patch(model, policy, budget=80, **options)
    assert "_kvevict" not in model.model.__dict__


def test_rows_of_one_s_own():
    """The first rows of a chunk observe; they keep the slots that these attend to."""

    @kvevict.register_rows("first")
    @dataclass(frozen=True)
    class First(kvevict.Rows):
        first: int = 4

        @property
        def most(self):
            return self.first

        def observe(self, call, past):
            (part,) = call.chunk().parts
            part = replace(part, q=part.q[:, :, : self.first], stop=part.stop - (part.q.shape[2] - self.first),
                           lse=part.lse[:, :, : self.first], out=part.out[:, : self.first])  # fmt: skip
            return Observation((part,))

        def observing(self, step):
            return np.minimum(self.first, step.positions.shape[1] - step.padding)

    try:
        model = tiny.model()
        kvevict.patch(model, "snapkv", rows="first", pool="none", budget=4)
        tiny.generate(model, tiny.prompt(1, 40), new=1)
        kept = kvevict.report(model, positions=True)["positions"]
        assert kept == [[[[0, 1, 2, 3]] * 2]] * 4  # they see nothing else
        saved = kvevict.Policy.from_json(build("snapkv", rows="first", budget=9).to_json())
        assert saved.rows == First()
    finally:
        del kvevict.ROWS["first"]


@pytest.mark.parametrize("policy", ["snapkv", "edie", "take", "cake", "paasvn"])
def test_sink_keeps_the_first_slots(policy):
    model = tiny.model()
    kvevict.patch(model, policy, budget=20, sink=3, **(dict(probe=4) if policy == "take" else dict(window=4)))
    tiny.generate(model, tiny.prompt(1, 60), new=1)
    for layer in kvevict.report(model, positions=True)["positions"]:
        assert all(head[:3] == [0, 1, 2] for head in layer[0])


@torch.no_grad()
def test_rerotated_attention_is_attention():
    """Scores of rows that attend by distances within the cache are taken at these distances: a row's sum is 1."""

    @kvevict.register_score("mass")
    @dataclass(frozen=True)
    class Mass(kvevict.Score):
        rows = kvevict.ROWS["window"]()
        needs = (kvevict.need("attention", reduce="mean"), "attention")

        def score(self, slots, mean, attention):
            masses.append(mean.sum(-1))
            return attention

    masses, model = [], tiny.model()
    try:
        kvevict.patch(model, "snapkv", score="mass", rerotate=True, budget=20, window=4, chunk_size=16)
        model(**tiny.prompt(1, 80))
        assert len(masses) == 16
        assert all(torch.allclose(mass, torch.ones_like(mass), atol=1e-5) for mass in masses)
    finally:
        del kvevict.SCORES["mass"]
