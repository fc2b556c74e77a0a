"""Layer budgets, head budgets, chunked selection and index reuse: against the float64 oracle, by hand, and together."""

import dataclasses
import itertools

import pytest
from policy_cases import BUDGET, CHUNK, compare, compare_in_chunks, model, ours, tokens

import kvevict

CHUNKED = dict(budget=BUDGET, chunk_size=CHUNK)
KVPRESS = dict(kernel=5, pool="avg", reduce="mean")
CHOICES = {
    "adakv": dict(window=4),
    "adakv, all by competition": dict(window=4, f=0.0),
    "adakv, no competition": dict(window=4, f=1.0),
    "adakv, floor": dict(window=4, floor="max", f=0.3),
    "adakv, mean": dict(window=5, pool="avg"),
    "adakv, floor of all": dict(window=6, **KVPRESS, floor="all"),
    "adakv, high floor of all": dict(window=2, **KVPRESS, floor="all", f=0.7),
    "snapkv, flat": dict(window=4, heads="flat"),
    "h2o, flat": dict(heads="flat", decode=True, interval=2),
    "h2o, ada": dict(heads="ada", recent=3, decode=True, interval=2),
    "keydiff, flat": dict(heads="flat"),
    "tova, flat": dict(per_head=True, heads="flat", interval=3),
    "take, flat": dict(probe=5, heads="flat"),
    "take, ada": dict(probe=5, heads="ada"),
    "pyramidkv": dict(window=4),
    "pyramidkv, steep": dict(window=4, beta=1000),
    "take, pyramid": dict(probe=3, layers="pyramid"),
    "h2o, pyramid": dict(layers="pyramid", decode=True, interval=3),
    "tova, pyramid": dict(layers="pyramid", beta=4),
    "knorm, pyramid, ada": dict(layers="pyramid", heads="ada", beta=3),
    "snapkv, pyramid, flat": dict(window=4, layers="pyramid", heads="flat"),
    "chunkkv": dict(window=4, c=5),
    "chunkkv, long runs": dict(window=2, c=11),
    "chunkkv, per head": dict(window=4, c=3, per_head=True),
    "chunkkv, per head, flat": dict(window=4, c=4, per_head=True, heads="flat"),
    "chunkkv, per head, ada": dict(window=4, c=4, per_head=True, heads="ada"),
    "chunkkv, whole runs": dict(window=4, c=5, exact=False),
    "chunkkv, whole runs per head": dict(window=4, c=5, exact=False, per_head=True, heads="flat"),
    "chunkkv, pooled": dict(window=4, c=4, pool="avg", kernel=3),
    "chunkkv, pyramid": dict(window=4, c=4, layers="pyramid"),
    "h2o, chunk": dict(select="chunk", c=4, decode=True, interval=2),
    "take, chunk": dict(probe=4, select="chunk", c=6),
    "chunkkv, reuse": dict(window=4, c=4, n_reuse=2),
    "edie, runs per head": dict(window=4, pool="none", select="chunk", c=4, per_head=True),
    "chunkkv, whole runs, pooled": dict(window=6, c=5, exact=False, **KVPRESS),
    "take+chunkkv": dict(probe=4, c=5),
    "snapkv, runs of one": dict(window=8, c=1, select="chunk", per_head=True),
    "snapkv, reuse of three": dict(window=4, n_reuse=3),
    "h2o, reuse": dict(n_reuse=2, decode=True, interval=2),
    "adakv, reuse, pyramid": dict(window=4, n_reuse=2, layers="pyramid"),
    "snapkv, by layer": dict(window=4, select_by_layer=((0, 2, kvevict.SELECTIONS["chunk"]()),)),
}  # "preset, remark": options
any_choice = pytest.mark.parametrize("name", CHOICES)


def options(name, **more):
    return name.split(",")[0], CHOICES[name] | more


def test_options_go_to_the_part_that_has_them():
    """Names of options are one part's own; `per_head` alone has the same meaning in a score and in a selection."""
    fields = lambda thing: [f.name for f in dataclasses.fields(thing) if f.init]  # noqa: E731
    kinds = {"policy": {*fields(kvevict.Policy)}}
    for kind, (registry, _) in kvevict.policy.PARTS.items():
        kinds[kind] = {name for part in registry.values() for name in fields(part)}
    for (_, one), (_, other) in itertools.combinations(kinds.items(), 2):
        assert one & other <= {"per_head"}
    policy = kvevict.policy.build(
        "snapkv", budget=64, window=8, layers="pyramid", beta=5, heads="ada", floor="max", select="chunk", c=3,
        per_head=True, n_reuse=2,
    )  # fmt: skip
    assert (policy.rows.window, policy.layers.beta, policy.heads.floor, policy.select.c) == (8, 5, "max", 3)
    assert policy.select.per_head and policy.n_reuse == 2


# -- against the oracle ---------------------------------------------------------------------------------------------


@any_choice
@pytest.mark.drawn(12)
def test_chunks(name):
    policy, chosen = options(name, **CHUNKED)
    compare_in_chunks(policy, **chosen)


@any_choice
def test_whole_prompt(name):
    policy, chosen = options(name, budget=BUDGET, chunk_size=80)
    compare(model(), policy, [[53]], **chosen)
    compare(model(num_key_value_heads=4), policy, [[53]], **chosen)


@any_choice
@pytest.mark.drawn(12)
def test_fractions_and_turns(name):
    policy, chosen = options(name, budget=0.4, chunk_size=14)
    compare(model(), policy, [[47, 1, 21, 1]], **chosen)


@any_choice
@pytest.mark.drawn(12)
def test_padded_rows(name):
    policy, chosen = options(name, **CHUNKED)
    compare(model(), policy, [[41, 1, 14], [26, 1, 14], [10, 1, 14]], **chosen)


@pytest.mark.parametrize("name", [name for name in CHOICES if not name.startswith("take")])
@pytest.mark.drawn(12)
def test_decoding(name):
    """The slots of a layer never exceed its budget by more than interval - 1 per head."""
    policy, chosen = options(name, **CHUNKED | dict(decode=True, interval=3))
    most = []

    def watch(call, cache):
        most.append(sum(int(layer.len.sum()) for layer in cache.layers))

    compare(model(), policy, [[29, *[1] * 14]], watch, **chosen)
    assert max(most) <= (BUDGET + 2) * 8


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
@pytest.mark.parametrize("name", ["adakv", "pyramidkv", "chunkkv, reuse", "snapkv, pyramid, flat"])
def test_models_with_sliding_windows(family, name):
    policy, chosen = options(name, **CHUNKED)
    compare(model(family), policy, [[40, 1, 1]], **chosen)


def test_errors_give_shares():
    """Slots in proportion to a history; a layer without errors keeps its window alone."""
    for errors in ([1.0, 3.0, 0.5, 2.0], [1.0, 0.0, 0.0, 50.0], [0.0] * 4):
        history = kvevict.history("shares")
        history.frozen, history.contexts, history.errors = True, 1, errors
        given = dict(window=4, layers="tada", heads="flat")
        row, mine = "snapkv", dict(**CHUNKED, **given)
        with_oracle(row, [[61]], mine | dict(task="shares"), mine | dict(errors=errors))


def with_oracle(policy, rows, mine, theirs):
    import oracle
    from policy_cases import NEAR

    for seed in range(30):
        try:
            (text,) = tokens(rows, seed)
            row = oracle.Row(model(), policy, near=NEAR, **theirs)
            row.read(text[0].tolist())
            break
        except oracle.NearTie:
            continue
    ((_, positions),) = ours(model(), policy, rows, seed, **mine)[0]
    assert positions == row.positions
