"""Sequences that decode together: each goes on as it would alone, whoever joins, leaves or is cut beside it."""

import copy
import gc

import pytest
import torch
from caches import ids
from tiny import relative, shared

import kvevict
from kvevict.answering.batch import Batch, Pools
from kvevict.engine.memory.layer import EvictionLayer
from kvevict.engine.read.budgets import places
from kvevict.models.families import find_decoder
from kvevict.ops import _ops

# name -> (family, policy, options)
CASES = {
    "snapkv": ("llama", "snapkv", dict(budget=10, window=4)), "adakv": ("llama", "adakv", dict(budget=10, window=4)),
    "h2o": ("llama", "h2o", dict(budget=10)), "tova": ("llama", "tova", dict(budget=10)),
    "take+edie": ("llama", "take+edie", dict(budget=16, probe=6, chunk_size=16)),
    "newest": ("llama", "streaming", dict(budget=10)),
    "prompt kept": ("llama", "tova", dict(budget=10, interval=3, keep_prompt=True)),
    "kvzip": ("llama", "kvzip", dict(budget=10)), "expected": ("llama", "expected", dict(budget=10)),
    "keeps all": ("llama", "snapkv", dict(budget=4096)), "8 bits": ("llama", "h2o", dict(budget=10, kv="int8")),
    "8 and 4 bits": ("llama", "take+edie", dict(budget=16, probe=6, chunk_size=16, kv="k8v4")),
    "latents": ("deepseek_v3", "snapkv", dict(budget=10, window=4)),
    "latents, h2o": ("deepseek_v3", "h2o", dict(budget=10)),
}  # fmt: skip
LENGTHS = (60, 23, 41, 9)
pytestmark = pytest.mark.usefixtures("no_grad")


def read(net, pools, length, seed):
    given = {} if pools is None else dict(past_key_values=pools.cache())
    return net(ids(1, length, seed), **given, logits_to_keep=1).past_key_values


def alone(net, cache, token):
    return net(torch.tensor([[token]]), past_key_values=cache).logits[0, -1]


def free_rows(pools):
    """The free rows of the fullest pool."""
    return min(pool.left() for pool in pools.of.values())


def same_slots(batch, row, cache):
    """The positions that a row of a batch holds are those of its twin."""
    at = batch.rows.index(row)
    for mine, other in zip(batch.cache.layers, cache.layers, strict=True):
        if isinstance(other, EvictionLayer):
            assert places(mine, False)[at] == places(other, False)[0]


@pytest.mark.quick(case="take+edie")
@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_each_goes_on_as_alone(case, pooled):
    """Four sequences join one after the other, and leave in another order; each decodes other tokens."""
    family, policy, options = CASES[case]
    most = 2e-3 if "kv" in options else 1e-4  # a number between two steps of a packed row is rounded to either of them
    net = shared(family) if family == "llama" else pytest.importorskip("zoo").make(family, "DeepseekV3ForCausalLM")
    with kvevict.evicting(net, policy, **options):
        pools = Pools(find_decoder(net), 4096) if pooled else None
        batch, twins = Batch(net), {}
        for step in range(24):
            if step in (0, 1, 5, 9):
                row = len(twins)
                cache = read(net, pools, LENGTHS[row], row)
                twins[row] = copy.deepcopy(cache)
                batch.add(row, cache)
            if step in (12, 15):
                row = {12: 1, 15: 0}[step]
                left = batch.remove(row)
                for token in (7, 8, 9):
                    assert relative(alone(net, left, token), alone(net, twins[row], token)) < most
            tokens = [5 + step + 20 * row for row in batch.rows]
            logits = batch.step(tokens)
            for row, token, got in zip(batch.rows, tokens, logits, strict=True):
                assert relative(got, alone(net, twins[row], token)) < most
                same_slots(batch, row, twins[row])


def compacts(monkeypatch):
    """A list that grows by one with every call that moves slots."""
    calls, compact = [], _ops.compact
    monkeypatch.setattr(_ops, "compact", lambda *args: calls.append(args) or compact(*args))
    return calls


def test_joining_and_leaving_copies_nothing(monkeypatch):
    net, rows = shared(), 4096
    with kvevict.evicting(net, "snapkv", budget=10, window=4):
        pools = Pools(find_decoder(net), rows)
        caches, batch = [read(net, pools, 30 + row, row) for row in range(3)], Batch(net)
        calls = compacts(monkeypatch)
        for row, cache in enumerate(caches):
            batch.add(row, cache)
        batch.step([5, 6, 7])
        batch.remove(1)
        batch.step([5, 6])
        left = [batch.remove(row) for row in (0, 2)]
        assert not calls and free_rows(pools) < rows
        assert len({layer.k.data_ptr() for each in left for layer in each.layers[:1]}) == 1
        del caches, cache, batch, left
        gc.collect()
        assert free_rows(pools) == rows  # every region came back


def test_forks_of_one_text_beside_a_sequence(monkeypatch):
    """Two questions share the kept slots of a text in one pool, and decode beside a prompt of another kind."""
    net = shared()
    with kvevict.evicting(net, "snapkv", budget=40, window=4):
        pools, batch, twins = Pools(find_decoder(net), 4096), Batch(net), {}
        text = read(net, pools, 60, 1)
        for row, cache in enumerate([text.fork(), text.fork(), read(net, pools, 20, 2)]):
            net(ids(1, 7 + row, 10 + row), past_key_values=cache)
            twins[row] = copy.deepcopy(cache)
            batch.add(row, cache)
        calls = compacts(monkeypatch)
        for step in range(12):
            tokens = [5 + step + 20 * row for row in range(3)]
            for row, (token, got) in enumerate(zip(tokens, batch.step(tokens), strict=True)):
                assert relative(got, alone(net, twins[row], token)) < 1e-4
        assert not calls
        monkeypatch.undo()
        assert relative(alone(net, batch.remove(1), 9), alone(net, twins[1], 9)) < 1e-4
        assert relative(batch.step([3, 4])[1], alone(net, twins[2], 4)) < 1e-4


@pytest.mark.parametrize("options", [dict(budget=4096), dict(budget=40, recall=True), dict(budget=4096, kv="int8")])
def test_rows_about_one_text_have_one_prefix(options):
    """`decode` reads a text's slots once for its rows, with another sequence between them."""
    net = shared()
    with kvevict.evicting(net, "take+edie", **options):
        pools, batch = Pools(find_decoder(net), 8192), Batch(net)
        text = read(net, pools, 100, 1)
        for row, cache in enumerate([text.fork(), read(net, pools, 20, 2), text.fork()]):
            if row != 1:
                net(ids(1, 7, row), past_key_values=cache)
            batch.add(row, cache)
        batch.step([5, 6, 7])
    for layer in batch.cache.layers:
        prefix = layer.storage.prefix
        assert torch.equal(prefix.offset[0], prefix.offset[2])
        assert prefix.counts[:, 0].tolist() == prefix.len[:, 0].tolist() == [100, 0, 100]


def test_a_full_pool_is_no_obstacle():
    """Slots that do not fit lie in other buffers, and are copied when they join."""
    net = shared()
    with kvevict.evicting(net, "snapkv", budget=10, window=4):
        pools, batch, twins = Pools(find_decoder(net), 300), Batch(net), []
        for row in range(4):
            cache = read(net, pools, 30, row)
            twins.append(copy.deepcopy(cache))
            batch.add(row, cache)
        for step in range(100):  # every head outgrows its room
            got, want = batch.step([5 + step % 90] * 4), [alone(net, twin, 5 + step % 90) for twin in twins]
            assert relative(got, torch.stack(want)) < 1e-4


@pytest.mark.parametrize("kv", ["model", "int4"])
def test_slots_that_a_pool_takes_stay_the_same(kv):
    """They are those of the cache that was read outside, and stay there where the pool has no room."""
    net = shared()
    with kvevict.evicting(net, "snapkv", budget=40, window=4, kv=kv):
        pools, small, cache = Pools(find_decoder(net), 4096), Pools(find_decoder(net), 10), read(net, None, 60, 1)
        twin = copy.deepcopy(cache)
        small.hold(cache)
        assert cache.layers[0].pool is None and free_rows(small) == 10
        pools.hold(cache)
        held, others = cache.layers[0].storage, twin.layers[0].storage
        assert held.k is pools.of[0].buffers[0] and free_rows(pools) == 4096 - held.counts.sum()
        assert all(map(torch.equal, held.positions()[0], others.positions()[0]))
        assert torch.equal(held.dense("k"), others.dense("k")) and torch.equal(held.dense("v"), others.dense("v"))
        assert torch.equal(alone(net, cache.fork(), 5), alone(net, twin.fork(), 5))


def test_a_copy_lies_outside_the_pool():
    net = shared()
    with kvevict.evicting(net, "h2o", budget=10):
        pools = Pools(find_decoder(net), 4096)
        cache = read(net, pools, 30, 1)
        free, twin = free_rows(pools), copy.deepcopy(cache)
        assert free_rows(pools) == free and twin.layers[0].pool is None
        assert twin.layers[0].k.data_ptr() != cache.layers[0].k.data_ptr()
        assert torch.equal(alone(net, cache, 5), alone(net, twin, 5))


STATES = {"lfm2": "a LinearAttentionLayer", "falcon_h1": "a StatefulLayer"}


@pytest.mark.parametrize("name", STATES)
def test_rows_of_a_cache_with_a_state(name):
    """They cannot join another cache, and say so; those that were read together part, each as alone."""
    net = pytest.importorskip("zoo").model(name)
    with kvevict.evicting(net, "h2o", budget=10):
        batch = Batch(net)
        batch.add("first", read(net, None, 30, 1))
        with pytest.raises(ValueError, match=f"{STATES[name]}, with a state: decode it alone"):
            batch.add("second", read(net, None, 20, 2))
        assert batch.rows == ["first"]
        prompts = ids(3, 40, 3)
        twins = [net(row[None]).past_key_values for row in prompts]
        batch = Batch(net, range(3), net(prompts).past_key_values)
        for left in ([], [1], [0]):
            for row in left:
                gone = batch.remove(row)
                assert relative(alone(net, gone, 9), alone(net, twins[row], 9)) < 1e-4
            for token, row in zip(batch.step(list(range(5, 5 + len(batch.rows)))), batch.rows, strict=True):
                assert relative(token, alone(net, twins[row], 5 + batch.rows.index(row))) < 1e-4


@pytest.mark.parametrize("name", STATES)
def test_rows_with_a_state_are_chosen_and_repeated(name):
    net, prompts = pytest.importorskip("zoo").model(name), ids(2, 40, 3)
    with kvevict.evicting(net, "h2o", budget=10):
        cache = net(prompts).past_key_values
        want = [alone(net, net(row[None]).past_key_values, 7) for row in prompts]
        chosen, repeated = cache.fork(), cache.fork()
        chosen.batch_select_indices(torch.tensor([1, 1, 0]))
        repeated.batch_repeat_interleave(2)
        for each, rows in ((chosen, [1, 1, 0]), (repeated, [0, 0, 1, 1]), (cache, [0, 1])):
            got = net(torch.full((len(rows), 1), 7), past_key_values=each).logits[:, -1]
            assert relative(got, torch.stack([want[row] for row in rows])) < 1e-4


REFUSED = {
    "empty": ("llama", "h2o", {}, "a cache is empty: read the prompt first"),
    "sliding": ("gemma3", "h2o", {}, "a SlidingLayer, with one length for all rows: decode it alone"),
    "policy": ("llama", "tova", {}, "two caches differ in their policy"),
    "model": ("llama", "h2o", dict(seed=1), "two caches differ in their model"),
    "dtype": ("llama", "h2o", dict(dtype=torch.bfloat16, seed=2), "two caches differ in their model"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case):
    family, policy, options, message = REFUSED[case]
    net, other = shared("llama"), shared(family, **options)
    with kvevict.evicting(net, "h2o", budget=10):
        batch, cache = Batch(net), read(net, None, 30, 1)
        batch.add(0, cache)
        batch.step([5])
        with kvevict.evicting(other, policy, budget=10):
            wrong = Pools(find_decoder(net), 64).cache() if case == "empty" else read(other, None, 20, 2)
        with pytest.raises(ValueError, match=message):
            batch.add(1, wrong)
        assert batch.rows == [0]
        batch.step([6])
        with pytest.raises(ValueError, match="tokens has 2 ids, expected 1"):
            batch.step([1, 2])
