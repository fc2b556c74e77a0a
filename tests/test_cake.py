"""CAKE's layer budget and its cascade: the float64 oracle cuts every layer once, after all were read."""

import pytest
from test_policies import BUDGET, CHUNK, compare, model

CHUNKED = dict(budget=BUDGET, chunk_size=CHUNK)
CHOICES = {
    "cake": dict(window=5),
    "cake, taus": dict(window=4, tau1=1.6, tau2=0.6),
    "cake, flat": dict(window=4, heads="flat"),
    "cake, ada": dict(window=3, heads="ada"),
    "cake, mostly average": dict(window=3, heads="ada", f=0.8),
    "cake, floor": dict(window=4, heads="ada", floor="max", f=0.4),
    "cake, runs": dict(window=4, select="chunk", c=3),
    "cake, runs per head": dict(window=3, select="chunk", c=3, per_head=True, heads="flat"),
    "cake, whole runs": dict(window=4, select="chunk", c=4, exact=False),
    "cake, whole runs per head": dict(window=3, select="chunk", c=4, exact=False, per_head=True),
    "cake, whole runs of ragged heads": dict(window=3, select="chunk", c=4, exact=False, per_head=True, heads="ada"),
    "cake, caote": dict(window=3, error="caote"),
    "cake, nothing protected": dict(window=3, error="caote", protect=False),
    "snapkv": dict(window=5, layers="cake"),
    "snapkv, even": dict(window=5, layers="cake", tau1=8.0, tau2=6.0),
    "paasvn": dict(window=4, sink=2, layers="cake"),
    "edie": dict(window=4, layers="cake"),
    "edie-exact": dict(window=4, layers="cake", heads="equal"),
}  # "preset, remark": options
any_choice = pytest.mark.parametrize("name", CHOICES)


def options(name, **more):
    return name.split(",")[0], CHOICES[name] | more


@any_choice
def test_chunks(name):
    policy, chosen = options(name, **CHUNKED)
    for n in (17, 61):
        compare(model(), policy, [[n, *[1] * 5]], **chosen)


@any_choice
def test_whole_prompt(name):
    policy, chosen = options(name, budget=BUDGET)
    compare(model(num_hidden_layers=7), policy, [[53]], **chosen)
    compare(model(num_key_value_heads=4), policy, [[53]], **chosen)
