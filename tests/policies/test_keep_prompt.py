"""`keep_prompt`: while decoding only what was decoded is cut (METHODS section 10)."""

import pytest
from test_policies import BUDGET, CHUNK, compare, model

DECODED = dict(budget=BUDGET, chunk_size=CHUNK, decode=True, keep_prompt=True)
POLICIES = {
    "streaming": {},
    "h2o": {},
    "tova": {},
    "snapkv": dict(window=4),
    "adakv": dict(window=4),
    "edie": dict(window=4),
    "defensive": dict(window=4),
    "vatp": dict(sink=2, recent=2),
    "chunkkv": dict(window=4, c=3),
    "snapkv+critical": dict(window=4),
    "h2o+caote": {},
    "take": dict(probe=5),
    "expected": dict(span=5),
    "pyramidkv": dict(window=4),
    "tri": dict(sink=2),
    "rkv": dict(window=4),
}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("interval", [1, 4])
@pytest.mark.drawn(12)
def test_against_the_oracle(name, interval):
    """Of heads that compete each has a prompt of another length; a turn cuts everything to the budget."""
    most = []

    def watch(call, cache):
        most.append(max(int(layer.counts.sum()) for layer in cache.layers))

    rows = [[29, *[1] * 22, 13, *[1] * 20], [11, *[1] * 22, 13, *[1] * 20]]
    compare(model(), name, rows, watch, **DECODED | dict(interval=interval), **POLICIES[name])


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gemma3"])
@pytest.mark.parametrize("name", ["tri", "rkv"])
def test_scores_for_long_answers(name, family):
    """Against the papers' formulas: prompts read whole and in chunks, turns, padded rows, partial rotation."""
    rows = [[29, *[1] * 16, 13, *[1] * 10], [9, *[1] * 16, 13, *[1] * 10]]
    own = dict(budget=BUDGET, interval=3, **POLICIES[name])
    compare(model(family), name, rows, **own)
    compare(model(family), name, rows[:1], chunk_size=CHUNK, keep_prompt=name == "rkv", **own)
