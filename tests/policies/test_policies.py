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
    "chunks": dict(budget=BUDGET, chunk_size=CHUNK),
    "budget above two chunks": dict(budget=27, chunk_size=13),
    "big chunks": dict(budget=13, chunk_size=24),
    "fraction": dict(budget=0.4, chunk_size=14),
    "chunks, evict at the end": dict(budget=BUDGET, chunk_size=CHUNK + 1, schedule="prompt"),
    "own schedule": dict(budget=BUDGET),
}
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


@pytest.mark.parametrize("name", ["streaming", "h2o", "tova", "snapkv", "knorm", "keydiff"])
def test_any_score_with_waiting_layers(name):
    policy, chosen = options(name, budget=BUDGET, chunk_size=CHUNK, warmup_layers=3, warmup_budget=22)
    calls = [41, 20]
    compare(model(), policy, [calls], **chosen)


@pytest.mark.parametrize("n", [13, 14, 15, 24, 25, 30])
@pytest.mark.parametrize("chunk", [13, 40])
def test_take_cuts_the_probe_to_half_of_a_short_prompt(n, chunk):
    compare(model(), "take", [[n]], budget=13, chunk_size=chunk, probe=12, kernel=3)


def test_take_relaxes_by_the_formula():
    """B_warmup = ceil(5 N / 64) above 12.8 B."""
    for n in (64, 200):
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


@pytest.mark.parametrize("name", ["streaming", "h2o", "tova"])
def test_decode_without_eviction(name):
    policy, chosen = options(name, budget=BUDGET, chunk_size=CHUNK, decode=False)
    compare(model(), policy, [[29, *[1] * 4, 9, 1]], **chosen)


@pytest.mark.parametrize("interval", [1, 5, 16])
@pytest.mark.parametrize(
    "name", [name for name in POLICIES if not name.startswith(("take, ", "h2o, 8", "snapkv, max", "oracle"))]
)
@pytest.mark.drawn(10)
def test_decode_with_eviction(name, interval):
    """However long, the cache never grows past budget + interval - 1, and reaches it."""
    policy, chosen = options(name, budget=BUDGET, chunk_size=CHUNK, decode=True, interval=interval)
    longest = []

    def bounded(call, cache):
        longest.append(max(int(layer.len.max()) for layer in cache.layers))

    compare(model(), policy, [[29, *[1] * 24]], bounded, **chosen)
    assert max(longest) == BUDGET + interval - 1


@pytest.mark.parametrize(
    "name", ["streaming", "h2o", "tova", "snapkv", "snapkv, window as long as the chunk", "keydiff"]
)
def test_decode_past_the_budget_after_a_prompt_of_one_token(name):
    policy, chosen = options(name, budget=BUDGET, decode=True, interval=3)
    compare(model(), policy, [[1, *[1] * 26]], **chosen)


@pytest.mark.parametrize("budget", [BUDGET, 0.4])
@any_policy
@pytest.mark.drawn(10)
def test_follow_up_turns(name, budget):
    """Further reads evict to the same budget, a fraction to its share of all tokens seen."""
    policy, chosen = options(name, budget=budget, chunk_size=CHUNK)
    compare(model(), policy, [[30, 1, 1, 1, 25, 1, 10, 1]], **chosen)


@pytest.mark.parametrize("name", ["h2o", "tova", "snapkv", "keydiff", "take"])
def test_follow_up_turns_of_two_tokens(name):
    policy, chosen = options(name, budget=BUDGET, chunk_size=CHUNK)
    compare(model(), policy, [[30, 2, 2, 1, 2]], **chosen)


@pytest.mark.parametrize("name", ["streaming", "h2o", "tova", "knorm", "keydiff"])
def test_follow_up_turns_with_eviction_while_decoding(name):
    policy, chosen = options(name, budget=BUDGET, chunk_size=CHUNK, decode=True, interval=4)
    compare(model(), policy, [[30, *[1] * 6, 25, *[1] * 6]], **chosen)


def test_a_turn_forgets_the_queries_decoded_before_it():
    """Their slots are no longer the last ones, and may be gone."""
    chosen = dict(budget=BUDGET, chunk_size=CHUNK, window=4, decode=True, interval=2)
    compare(model(), "snapkv", [[30, 1, 1, 1, 25, 1, 1, 1, 1, 1]], **chosen)


@any_policy
@pytest.mark.drawn(12)
def test_left_padded_rows_are_read_as_if_alone(name):
    policy, chosen = options(name, budget=BUDGET, chunk_size=CHUNK)
    later = [1, 1, 1, 14, 1]
    compare(model(), policy, [[41, *later], [26, *later], [10, *later]], **chosen)


@pytest.mark.parametrize("name", ["h2o", "snapkv", "take", "take, span from the end", "keydiff"])
@pytest.mark.parametrize("geometry", ["own schedule", "fraction", "chunks, evict at the end"])
def test_left_padded_rows_in_other_geometries(name, geometry):
    policy, chosen = options(name, **GEOMETRIES[geometry])
    compare(model(), policy, [[17], [52], [11]], **chosen)


@pytest.mark.parametrize("name", ["h2o", "tova", "snapkv", "keydiff"])
def test_padded_rows_decode_as_if_alone(name):
    policy, chosen = options(name, budget=BUDGET, chunk_size=CHUNK, decode=True, interval=1)
    later = [1] * 12
    compare(model(), policy, [[30, *later], [9, *later], [14, *later]], **chosen)


@pytest.mark.parametrize("name", ["streaming", "h2o", "tova", "snapkv", "keydiff"])
def test_a_row_is_cut_while_decoding_only_when_it_is_full_itself(name):
    policy, chosen = options(name, budget=BUDGET, chunk_size=CHUNK, decode=True, interval=6)
    later = [1] * 20
    compare(model(), policy, [[30, *later], [13, *later]], **chosen)


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


@pytest.mark.parametrize(
    "name", ["streaming", "h2o", "tova", "snapkv", "keydiff", "take", "take, span", "take, no probe"]
)
def test_budget_above_all_tokens_changes_nothing(name):
    policy, chosen = options(name, budget=64, chunk_size=CHUNK, decode=True)
    ids = tokens([[61]], 0)[0][0]
    with torch.no_grad():
        want = model()(ids[None], use_cache=False).logits[0]
    got = torch.cat([logits for ((logits, _),) in ours(model(), policy, [[41, *[1] * 20]], 0, **chosen)])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


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
    often, once = (
        ours(model(), "random", [[61]], 0, budget=BUDGET, chunk_size=CHUNK, schedule=s)[0][0][1]
        for s in ("chunk", "prompt")
    )
    assert often == once


@pytest.mark.parametrize("policy", ["take:append=false", "take:append=false,warmup_layers=none"])
def test_take_without_a_probe_observes_with_half_of_a_short_prompt(policy):
    """p, cut to half of a shorter prompt, is the number of observing rows too."""
    compare(model(), policy, [[17]], budget=13, chunk_size=40, probe=12, kernel=3)
