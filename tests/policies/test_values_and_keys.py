"""LagKV, Compactor, DefensiveKV and CriticalKV: scores of keys and values, against the oracle and by hand."""

import pytest
import test_policies
import torch
from test_policies import BUDGET, CHUNK, compare, compare_in_chunks, kept, model, tokens

import kvevict
from kvevict.policy import build

CHUNKED = dict(budget=BUDGET, chunk_size=CHUNK)
CHOICES = {
    "lagkv": dict(part=4, sink=2),
    "lagkv, parts compete": dict(part=5, sink=1, ranks=False, heads="ada"),
    "lagkv, no sink": dict(part=3, sink=0, ranks=False, heads="flat"),
    "lagkv, runs": dict(part=4, sink=2, ranks=False, select="chunk", c=2),
    "lagkv, wait": dict(part=4, sink=2, warmup_layers=3, warmup_budget=22),
    "compactor": dict(sink=3, recent=2, block=5, sketch=6),
    "compactor, keys alone": dict(sink=1, recent=3, blend=1e6, sketch=7, seed=3),
    "compactor, values alone": dict(sink=0, recent=0, blend=0, heads="flat"),
    "defensive": dict(window=4),
    "defensive, covered": dict(window=3, cover=1.0, kernel=3, sink=2, heads="flat"),
    "defensive, nothing first": dict(window=4, cover=0.0, heads="equal"),
    "defensive/pool": dict(window=4, least=2),
    "defensive, all rows": dict(rows="all", heads="flat", kernel=1),
    "snapkv+critical": dict(window=4),
    "adakv+critical": dict(window=4, pool="avg", kernel=3),
    "h2o, critical": dict(refine="critical", recent=3),
    "kvzip, critical": dict(refine="critical"),
    "cake, critical": dict(refine="critical", window=4),
}  # "preset, remark": options
any_choice = pytest.mark.parametrize("name", CHOICES)


@pytest.fixture(autouse=True)
def near(monkeypatch, request):
    """Logits that are not scaled (Compactor) magnify the rounding of float32."""
    if "compactor" in request.node.name:
        monkeypatch.setattr(test_policies, "NEAR", 1e-4)


def options(name, **more):
    return name.split(",")[0], more | CHOICES[name]


# -- against the oracle ---------------------------------------------------------------------------------------------


@any_choice
def test_chunks(name):
    policy, chosen = options(name, **CHUNKED)
    compare_in_chunks(policy, **chosen)


@any_choice
def test_whole_prompt(name):
    policy, chosen = options(name, budget=BUDGET, chunk_size=80)
    compare(model(), policy, [[53]], **chosen)
