"""Presets over prompts, decoded tokens, turns and batches, against the float64 oracle (policy_cases.py)."""

import itertools

import oracle
import pytest
import torch
from caches import kept
from policy_cases import BUDGET, CHUNK, POLICIES, alone_and_batched, compare, model, options, ours, tokens

from kvevict.engine.read import choosers
from kvevict.policy.selections import Selection

LENGTHS = [1, CHUNK, CHUNK + 1, BUDGET, BUDGET + 1, 2 * CHUNK, 40, 61]

GEOMETRIES = {
    "chunks": dict(budget=BUDGET, chunk_size=CHUNK), "budget above two chunks": dict(budget=27, chunk_size=13),
    "big chunks": dict(budget=13, chunk_size=24), "fraction": dict(budget=0.4, chunk_size=14),
    "chunks, evict at the end": dict(budget=BUDGET, chunk_size=CHUNK + 1, schedule="prompt"),
    "own schedule": dict(budget=BUDGET),
}  # fmt: skip
any_policy = pytest.mark.parametrize("name", POLICIES)


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gemma2", "gemma3", "gpt_oss"])
def test_the_oracle_that_keeps_everything_is_the_unpatched_model(family):
    made, ids = model(family), tokens([[40]], 0)[0][0]
    row = oracle.Row(made, "take", 1000, chunk_size=12, probe=5)
    logits = torch.cat([row.read(ids[:30].tolist()), *(row.step(t)[None] for t in ids[30:].tolist())])
    with torch.no_grad():
        torch.testing.assert_close(made(ids[None], use_cache=False).logits[0].double(), logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("geometry", GEOMETRIES)
@any_policy
@pytest.mark.drawn(40)
def test_read(name, geometry):
    lengths = LENGTHS if geometry == "chunks" else [17, 61]
    policy, chosen = options(name, **GEOMETRIES[geometry])
    for n in lengths:
        ((_, positions),) = compare(model(), policy, [[n]], **chosen)[0]
        if isinstance(chosen["budget"], int):
            assert {len(head) for layer in positions for head in layer} == {min(n, chosen["budget"])}


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("name", ["h2o", "tova", "tova, per head", "snapkv", "keydiff", "take", "take, chunk only"])
def test_read_and_decode_with_groups_of(heads, name):
    policy, chosen = options(name, decode=True, budget=BUDGET, chunk_size=CHUNK, interval=2)
    calls = [40] if name.startswith("take") else [40, *[1] * 6]
    compare(model(num_key_value_heads=heads), policy, [calls], **chosen)


@pytest.mark.parametrize("family", ["qwen3", "phi3", "gemma2", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("name", ["h2o", "snapkv", "take", "take, span", "vatp", "take+caote"])
@pytest.mark.drawn(12)
def test_read_and_decode_of_other_families(family, name):
    policy, chosen = options(name, budget=BUDGET, chunk_size=CHUNK)
    compare(model(family), policy, [[40, 1, 1, 1]], **chosen)


@pytest.mark.parametrize("n", [13, 14, 15, 24, 25, 30])
@pytest.mark.parametrize("chunk", [13, 40])
def test_take_cuts_the_probe_to_half_of_a_short_prompt(n, chunk):
    compare(model(), "take", [[n]], budget=13, chunk_size=chunk, probe=12, kernel=3)


@pytest.mark.parametrize("n", [64, 200])
def test_take_relaxes_by_the_formula(n):
    """B_warmup = ceil(5 N / 64) above 12.8 B."""
    compare(model(), "take", [[n]], budget=6, chunk_size=24, probe=4)


@pytest.mark.parametrize("span", [(7, 12), (0, 3), (-9, -4), (-5, 0)])
@pytest.mark.parametrize("n", [17, 41])
def test_take_probe_from_a_span(span, n):
    """It is appended to every chunk, the last too, and protects nothing."""
    chosen = dict(budget=BUDGET, chunk_size=CHUNK, probe=span)
    compare(model(), "take", [[n]], **chosen)
    compare(model(), "take", [[n]], **chosen | dict(chunk_size=n))


@pytest.mark.parametrize("name", ["take", "take, relaxed", "take, all wait", "take, span", "take, no probe"])
def test_waiting_layers_hold_what_the_first_scoring_layer_chose(name):
    policy, chosen = options(name, budget=BUDGET, chunk_size=CHUNK)
    W = chosen.get("warmup_layers", 2)

    def shared(call, cache):
        layers = kept(cache)
        assert all(layer == layers[W - 1] for layer in layers[:W])
        assert all(layer != layers[W - 1] for layer in layers[W:])

    compare(model(), policy, [[61]], shared, **chosen)


# Evict while decoding unless told not to.
ONLINE = [name for name in POLICIES if name.startswith(("streaming", "h2o", "tova", "snapkv+"))]


@any_policy
@pytest.mark.drawn(12)
def test_decode_as_the_preset_does(name):
    policy, chosen = options(name, budget=BUDGET, chunk_size=CHUNK)

    def grows(call, cache):
        most = BUDGET + (0 if name in ONLINE else call)
        assert all((layer.len == most).all() for layer in cache.layers)

    compare(model(), policy, [[29, *[1] * 20]], grows, **chosen)


@pytest.mark.parametrize("name", ["h2o", "snapkv", "take", "take, span from the end", "keydiff"])
@pytest.mark.parametrize("geometry", ["own schedule", "fraction", "chunks, evict at the end"])
def test_left_padded_rows_in_other_geometries(name, geometry):
    policy, chosen = options(name, **GEOMETRIES[geometry])
    compare(model(), policy, [[17], [52], [11]], **chosen)


SITUATIONS = {  # presets, options, calls of each row
    "layers wait": (
        "streaming; h2o; tova; snapkv; knorm; keydiff", dict(warmup_layers=3, warmup_budget=22), [[41, 20]]),
    "no eviction while decoding": ("streaming; h2o; tova", dict(decode=False), [[29, *[1] * 4, 9, 1]]),
    "past the budget after a prompt of one token": (
        "streaming; h2o; tova; snapkv; snapkv, window as long as the chunk; keydiff",
        dict(chunk_size=64, decode=True, interval=3), [[1, *[1] * 26]]),
    "turns of two tokens": ("h2o; tova; snapkv; keydiff; take", {}, [[30, 2, 2, 1, 2]]),
    "eviction while decoding, a turn": (
        "streaming; h2o; tova; knorm; keydiff", dict(decode=True, interval=4), [[30, *[1] * 6, 25, *[1] * 6]]),
    "a turn forgets the queries decoded before it, whose slots are no longer the last": (
        "snapkv", dict(decode=True, interval=2), [[30, 1, 1, 1, 25, 1, 1, 1, 1, 1]]),
    "padded rows decode": (
        "h2o; tova; snapkv; keydiff", dict(decode=True, interval=1), [[n, *[1] * 12] for n in (30, 9, 14)]),
    "a row is cut only when it is full itself": (
        "streaming; h2o; tova; snapkv; keydiff", dict(decode=True, interval=6), [[n, *[1] * 20] for n in (30, 13)]),
}  # fmt: skip


@pytest.mark.parametrize("what, name", [(key, name) for key in SITUATIONS for name in SITUATIONS[key][0].split("; ")])
def test_situations(what, name):
    _, more, rows = SITUATIONS[what]
    policy, chosen = options(name, **dict(budget=BUDGET, chunk_size=CHUNK) | more)
    compare(model(), policy, rows, **chosen)


@pytest.mark.parametrize("name", ["streaming", "h2o", "tova", "snapkv", "keydiff", "take", "take, no probe", "random"])
def test_two_runs_are_bitwise_equal(name):
    policy, chosen = (name, {}) if name == "random" else options(name)
    chosen |= dict(budget=BUDGET, chunk_size=CHUNK, decode=True, interval=1)
    rows = [[41, 1, 1, 1, 20, 1], [22, 1, 1, 1, 20, 1]]
    one, two = (ours(model(), policy, rows, 0, **chosen) for _ in range(2))
    for (logits, positions), (again, same) in zip(itertools.chain(*one), itertools.chain(*two)):
        assert positions == same and torch.equal(logits, again)


@pytest.mark.parametrize("asked", [False, True])
def test_a_part_of_a_class_of_the_user(asked, monkeypatch):
    """A subclass that changes no method goes H2O's short way, and one that does is asked; both keep the same."""
    dropped, drop = [], choosers.drop

    class Own(Selection):
        if asked:

            def rank(self, slots, score):
                return super().rank(slots, score)

    monkeypatch.setattr(choosers, "drop", lambda *cut: dropped.append(drop(*cut)) or dropped[-1])
    policy, chosen = options("h2o", budget=BUDGET, chunk_size=CHUNK, decode=True, interval=1)
    want, got = (ours(model(), policy, [[30, *[1] * 9]], 3, **chosen, select=x) for x in ("token", Own()))
    assert dropped == [True] * 36 + [not asked] * 36  # of 4 layers and 9 tokens
    assert [[x[1] for x in call] for call in got] == [[x[1] for x in call] for call in want]


def test_random_depends_on_the_seed_and_on_nothing_else():
    chosen = dict(budget=BUDGET, chunk_size=CHUNK)
    alone_and_batched("random", **chosen)
    one, same_seed, other_seed, other_text = (
        ours(model(), "random", [[41]], text, seed=seed, **chosen)[0][0][1]
        for text, seed in ((0, 0), (0, 0), (0, 1), (1, 0))
    )
    assert one == same_seed == other_text != other_seed
    heads = [tuple(head) for layer in one for head in layer]
    assert len(set(heads)) == len(heads), "layers and heads draw their own"


def test_random_evicts_the_same_after_every_chunk_or_at_the_end():
    """A slot's number depends on its position alone: the best of the best are the best."""
    chosen = dict(budget=BUDGET, chunk_size=CHUNK)
    often, once = (ours(model(), "random", [[61]], 0, schedule=s, **chosen)[0][0][1] for s in ("chunk", "prompt"))
    assert often == once


@pytest.mark.parametrize("policy", ["take:append=false", "take:append=false,warmup_layers=none"])
def test_take_without_a_probe_observes_with_half_of_a_short_prompt(policy):
    """p, cut to half of a shorter prompt, is the number of observing rows too."""
    compare(model(), policy, [[17]], budget=13, chunk_size=40, probe=12, kernel=3)
