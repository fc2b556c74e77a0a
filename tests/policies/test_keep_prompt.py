"""`keep_prompt`: while decoding only decoded tokens are cut (METHODS section 10)."""

import pytest
import torch
from caches import kept
from choices import ANSWERS
from policy_cases import BUDGET, CHUNK, compare, model, ours, tokens

import kvevict
from kvevict.policy.building import build
from kvevict.policy.policy import Policy

DECODED = dict(budget=BUDGET, chunk_size=CHUNK, decode=True, keep_prompt=True)


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("interval", [1, 4])
@pytest.mark.drawn(8)
def test_against_the_oracle(name, interval):
    """Of heads that compete each has a prompt of another length; a turn cuts everything to the budget."""
    most = []

    def watch(call, cache):
        most.append(max(int(layer.counts.sum()) for layer in cache.layers))

    rows = [[29, *[1] * 22, 13, *[1] * 20], [11, *[1] * 22, 13, *[1] * 20]]
    compare(model(), name.split(",")[0], rows, watch, **DECODED | dict(interval=interval), **ANSWERS[name])


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gemma3"])
@pytest.mark.parametrize("name", ["tri", "rkv"])
def test_scores_for_long_answers(name, family):
    """Against the papers' formulas: prompts in one pass and in chunks, turns, padded rows, partial rotation."""
    rows = [[29, *[1] * 16, 13, *[1] * 10], [9, *[1] * 16, 13, *[1] * 10]]
    own = dict(budget=BUDGET, interval=3, **ANSWERS[name])
    compare(model(family), name, rows, **own)
    compare(model(family), name, rows[:1], chunk_size=CHUNK, keep_prompt=name == "rkv", **own)


RAGGED = dict(policy="adakv", budget=8, window=3, interval=1, decode=True, keep_prompt=True)


def written(cache, count, seed=0):
    """Decodes tokens into a cache of any batch."""
    data = tokens([[count]], seed)[0][0]
    for token in data:
        model()(token.expand(len(cache.sequence.seen), 1), past_key_values=cache, use_cache=True)
    return cache


def read(ids):
    return model()(ids, use_cache=True, logits_to_keep=1).past_key_values


@torch.no_grad()
def test_the_prompt_stays_and_what_is_decoded_has_the_budget():
    """Whatever a head's share of the prompt is; also in beams, forks and copies."""
    ids = tokens([[30]], 3)[0][0][None]
    with kvevict.evicting(model(), **RAGGED):
        cache = read(ids)
        first = [[list(head) for head in layer[0]] for layer in kept(cache)]
        assert len({len(head) for layer in first for head in layer}) > 1, "heads are ragged"
        fork = cache.fork()
        beams = read(ids.expand(2, -1))
        written(beams, 3)
        beams.reorder_cache(torch.tensor([1, 1]))
        for each in (written(cache, 40), written(fork, 40), written(beams, 37)):
            for layer in kept(each):
                for row in layer:
                    mine = first[kept(each).index(layer)]
                    assert [head[: len(old)] for head, old in zip(row, mine)] == mine
                    assert sum(map(len, row)) == sum(map(len, mine)) + 2 * 8
                    assert all(p >= 30 for head, old in zip(row, mine) for p in head[len(old) :])


@torch.no_grad()
def test_a_share_of_the_prompt():
    """A budget that is a share is turned into slots once, when the prompt is read; the layer holds the prompt's slots,
    as many decoded ones, and those of an interval."""
    options = dict(budget=0.15, recent=3, interval=2)  # of 30 tokens 5 slots
    with kvevict.evicting(model(), "random/redraw", **options):
        cache, held = read(tokens([[30]], 3)[0][0][None]), []
        for _ in range(12):
            held.append([int(count) for layer in written(cache, 1).layers for count in layer.counts[0]])
    assert held == [[5 + slots] * 8 for slots in (1, 2, 3, 4, 5, 6, 5, 6, 5, 6, 5, 6)]


@torch.no_grad()
def test_a_prompt_that_another_policy_read_is_what_is_there():
    """So a prompt can be kept whole, however long it is."""
    ids = tokens([[30]], 3)[0][0][None]
    with kvevict.evicting(model(), "random", budget=4096):
        cache = written(read(ids), 2)
    with kvevict.evicting(model(), **RAGGED):
        written(cache, 30, seed=1)
    assert all(head[:32] == list(range(32)) for layer in kept(cache) for head in layer[0])
    assert all(sum(map(len, layer[0])) == 2 * (32 + 8) for layer in kept(cache))
    with kvevict.evicting(model(), "streaming", budget=16, decode=True):
        written(cache, 1, seed=2)
    assert all(layer.prompt is None for layer in cache.layers), "which evicted from it"


@torch.no_grad()
def test_crop_into_the_prompt():
    with kvevict.evicting(model(), **RAGGED | dict(budget=40)):
        cache = written(read(tokens([[30]], 3)[0][0][None]), 3)
        cache.crop(-8)
        assert [layer.prompt.tolist() for layer in cache.layers] == [[[25, 25]]] * 4
        written(cache, 50, seed=1)
    assert all(head[:25] == list(range(25)) for layer in kept(cache) for head in layer[0])


def test_random_draws_anew_at_every_eviction():
    """Uniform over the remaining slots, head by head: old tokens become rarer; the last and the prompt stay."""
    chosen = dict(budget=40, recent=8, interval=10)
    runs = ours(model(), "random/redraw", [[20, *[1] * 240]], 0, **chosen)
    positions = [head for layer in runs[-1][0][1] for head in layer]
    ages = torch.tensor([sum(20 + a <= p < 20 + a + 60 for head in positions for p in head) for a in (0, 60, 120, 180)])
    assert all(head[:20] == list(range(20)) for head in positions)
    assert all(head[-8:] == list(range(252, 260)) for head in positions)
    assert ages.tolist() == sorted(ages.tolist()) and ages[0] < ages[3] / 4
    assert len(set(map(tuple, positions))) == len(positions), "heads and layers draw their own"
    assert ours(model(), "random/redraw", [[20, *[1] * 240]], 1, **chosen)[-1][0][1] == runs[-1][0][1]
    again = ours(model(), "random/redraw", [[20, *[1] * 240]], 0, **chosen, redraw=False)[-1][0][1]
    fixed = [head for layer in again for head in layer]
    old = sum(20 <= p < 140 for head in fixed for p in head)
    assert old > 3 * ages[:2].sum(), "a fixed hash is uniform over all that was decoded"


@pytest.mark.parametrize("given, said", [
    (dict(interval=4), "interval=4.*decode=True"), (dict(keep_prompt=True), "keep_prompt=True.*decode=True"),
    (dict(keep_prompt=1, decode=True), "keep_prompt"),
])  # fmt: skip
def test_what_says_how_to_decode_needs_decode(given, said):
    with pytest.raises((ValueError, TypeError), match=said):
        build("snapkv", budget=64, **given)


def test_decode_false_takes_with_it_how_to_decode():
    for name in ("random/redraw", "tri", "rkv", "snapkv+caote"):
        policy = build(name, budget=100, decode=False)
        assert (policy.decode, policy.interval, policy.keep_prompt) == (False, None, False)
        assert Policy.from_json(policy.to_json()) == policy
    assert build(build("snapkv", budget=64, decode=True), interval=3).interval == 3
    assert [build(name, budget=100).interval for name in ("random/redraw", "tri", "rkv")] == [64, 128, 128]
