"""Names: parts of one's own, and what is said of wrong ones."""

import json
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from transformers import DynamicCache

import kvevict
from kvevict.policy import peers
from kvevict.policy.building import build, choose
from kvevict.policy.parts import PARTS
from kvevict.policy.policy import Policy
from kvevict.policy.scores import SCORES
from kvevict.policy.seen.rows import Observation


@pytest.mark.parametrize("policy, options, message", [
    ("take", dict(alpha=0.32), "unknown option 'alpha'; did you mean 'ema_alpha'"),
    ("snapkv", dict(refinement="caote"), "unknown option 'refinement'; did you mean 'refine'"),
    ("snapkv", dict(error="caote"), "unknown option 'error'; known: .*refine"),
    ("take", dict(probe_positions="true"), "unknown option 'probe_positions'; known: .*ema_alpha"),
    ("take+edie", dict(window=8), r"'window': it is of rows='drafted', 'lookahead', 'window'; rows='probe' has .*be$"),
    ("h2o", dict(c=3), "'c': it is of select='chunk'; select='token' has none"),
    ("vatp", dict(base="snapkv"), "unknown option 'base'; known: .*score"),
])  # fmt: skip
def test_unknown_options_name_the_nearest(policy, options, message):
    with pytest.raises(ValueError, match=message):
        build(policy, budget=64, **options)


@pytest.mark.parametrize("options, message", [
    (dict(compression_ratio=0.5), "unknown option 'compression_ratio': here it is budget=, the fraction that is kept"),
    (dict(max_capacity_prompt=64), "'max_capacity_prompt': here it is budget=, the slots kept"),
    (dict(budget=64, window_size=8), "'window_size': here it is window="),
])  # fmt: skip
def test_options_of_other_libraries_name_ours(options, message):
    with pytest.raises(ValueError, match=message):
        build("snapkv", **options)


def test_other_libraries_names_are_not_ours():
    own = {f.name for part in [Policy, *(p for r, _ in PARTS.values() for p in r.values())] for f in fields(part)}
    assert not own & peers.NAMES.keys()
    assert {said.partition("=")[0] for said in peers.NAMES.values()} <= own


def test_what_is_gone_says_what_to_write():
    """As an error of an unknown name; docs/migrating.md has a row of each."""
    page = (Path(__file__).parents[2] / "docs/migrating.md").read_text("utf-8")
    for name, text in peers.PRESETS.items():
        with pytest.raises(ValueError, match=re.escape(f"unknown policy {name!r}; write {text!r}")):
            build(name, budget=300)
        choose(text.replace("FOLDER", "/a/folder"), budget=300)
        assert f"| `{name}` | `{text}` |" in page
    for name, now in peers.OPTIONS.items():
        with pytest.raises(ValueError, match=re.escape(f"unknown option {name!r}; {now}")):
            build("paasvn", budget=300, **{name: 1})
        assert f"| option `{name}` | {now} |" in page
    with pytest.raises(ValueError, match="unknown option of snapkv 'sink'; write keep_first="):
        Policy.from_json('{"score": {"name": "snapkv", "sink": 4}}')


def test_saved_policies_may_name_constants():
    """JSON from when they were options is read if it has their values."""
    old = {"beta": 20, "blend": 0.35, "eps": 0.01, "instruction": []}
    assert old == peers.FIXED
    for kind, name, option in (("layers", "pyramid", "beta"), ("score", "compactor", "blend"),
                               ("score", "expected", "eps"), ("rows", "repeat", "instruction")):  # fmt: skip
        made = Policy.from_json(json.dumps({kind: {"name": name, option: old[option]}}))
        assert type(getattr(made, kind)) is PARTS[kind][0][name]
        with pytest.raises(ValueError, match=f"unknown option of {name} '{option}'"):
            Policy.from_json(json.dumps({kind: {"name": name, option: 7}}))


def test_a_text_is_a_policy():
    """Keywords win over it."""
    text = "snapkv:window=8,budget=64,layers=pyramid"
    assert choose(text).policy == build("snapkv", window=8, budget=64, layers="pyramid")
    more = dict(window=9, budget=70, chunk_size=99)
    assert choose(text, **more).policy == build("pyramidkv", **more)
    with pytest.raises(ValueError, match="unknown policy 'snapv'; did you mean 'snapkv'"):
        choose("snapv:window=8", budget=64)


def test_a_policy_s_first_argument_is_its_score():
    assert Policy("knorm", budget=64) == Policy(score="knorm", budget=64)


@pytest.mark.parametrize("fields, message", [
    ({"refinement": "none"}, "unknown field of a policy 'refinement'; did you mean 'refine'"),
    ({"error": {"name": "none"}}, "unknown field of a policy 'error'; known: .*refine"),
    ({"rows": {"name": "probe", "alpha": 0.3}}, "unknown option of probe 'alpha'; did you mean 'ema_alpha'"),
    ({"score": {"name": "vatp", "base": "h2o"}}, "unknown option of vatp 'base'; known: recent, sink"),
])  # fmt: skip
def test_unknown_fields_in_json_name_the_nearest(fields, message):
    with pytest.raises(ValueError, match=message):
        Policy.from_json(json.dumps(fields | {"budget": 128}))


def test_no_option_has_two_meanings():
    """An option by keyword goes to one part; `per_head` goes to two, and means the same."""
    seen = {}
    for kind, (registry, _) in PARTS.items():
        for part in registry.values():
            for field in fields(part):
                seen.setdefault(field.name, set()).add(kind)
    policy = {f.name for f in fields(Policy)}
    assert {name for name, kinds in seen.items() if len(kinds) > 1 or name in policy} == {"per_head"}
    made = build(
        "snapkv", budget=64, window=8, layers="tada", task="named", heads="ada", floor="max", select="chunk", c=3,
        per_head=True,
    )  # fmt: skip
    assert (made.rows.window, made.layers.task, made.heads.floor, made.select.c) == (8, "named", "max", 3)


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

        def observing(self, rows):
            return np.minimum(self.first, rows.tokens)

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


@pytest.mark.parametrize("kind, name, message", [
    ("score", "length", "score 'own' returned the shape .1, 2, 39.: return .1, 2, 40. or .1, 1, 40."),
    ("score", "dtype", "score 'own' returned torch.float64: return a tensor of torch.float32"),
    ("score", "none", "score 'own' returned NoneType: return"),
    ("select", "length", "selection 'own' returned the shape"),
    ("heads", "heads", "head budget 'own' returned the shape .1, 1.: return .1, 2."),
    ("heads", "dtype", "head budget 'own' returned torch.int64: return a tensor of torch.int32"),
    ("heads", "many", "head budget 'own' keeps .20, 20. slots of a layer's heads: .* and a sum of 16"),
    ("heads", "few", "head budget 'own' keeps .1, 1. slots of a layer's heads: return at least .4, 4."),
    ("layers", "short", "layer budget 'own' returned the shares .*: return 4 finite numbers >= 0"),
    ("layers", "long", "return 4 finite"), ("layers", "negative", "return 4 finite"),
    ("layers", "nan", "return 4 finite"),
])  # fmt: skip
@torch.no_grad()
def test_what_a_part_of_one_s_own_must_return(kind, name, message, monkeypatch):
    """The error names the part, before a slot is lost."""
    registry, base = PARTS[kind]
    wrong = dict(
        length=lambda x: x[..., :-1], none=lambda x: None, heads=lambda x: x[:, :1],
        dtype=lambda x: x.double() if x.is_floating_point() else x.long(),
        many=lambda x: 0 * x + 20, few=lambda x: 0 * x + 1,
        short=lambda x: x[:3], long=lambda x: [*x, 1], negative=lambda x: [-1, *x[1:]], nan=lambda x: [*x[1:], np.nan],
    )[name]  # fmt: skip
    right = dict(score=kvevict.SCORES["snapkv"], heads=kvevict.HEADS["flat"], layers=base, select=base)[kind]
    method = dict(score="score", heads="keep", layers="shares", select="rank")[kind]
    own = type(
        "Own", (right,), {method: lambda self, *args, **more: wrong(getattr(right, method)(self, *args, **more))}
    )
    monkeypatch.setitem(registry, "own", dataclass(frozen=True)(own))
    model, inputs = tiny.model(), tiny.prompt(1, 40)
    cache = DynamicCache(config=model.config)
    with pytest.raises((ValueError, TypeError), match=message):
        kvevict.patch(model, "snapkv", budget=8, window=4, **{kind: "own"})
        model(**inputs, past_key_values=cache, logits_to_keep=1)
    with pytest.raises(ValueError, match=f"unknown policy 'own': it is a name for {kind}=; write 'snapkv:{kind}=own'"):
        kvevict.patch(model, "own", budget=8)


@torch.no_grad()
def test_attention_sums_to_one():
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
        kvevict.patch(model, "snapkv", score="mass", budget=20, window=4, chunk_size=16)
        model(**tiny.prompt(1, 80))
        assert len(masses) == 16
        assert all(torch.allclose(mass, torch.ones_like(mass), atol=1e-5) for mass in masses)
    finally:
        del kvevict.SCORES["mass"]


def test_the_docs_name_every_score_that_evicts_at_each_token():
    """`Policy` names the scores of each default interval but the usual one, 16."""
    text = Policy.__doc__.partition("\n    interval ")[2].partition("\n    keep_prompt ")[0]
    for name, score in SCORES.items():
        if score().own_interval != 16:
            assert name in text, name
