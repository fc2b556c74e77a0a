"""Forks of a cache: each continues as a deep copy would, shares the kept slots, and changes no other cache."""

import copy

import pytest
import torch
from caches import held, ids, same, tokens_of
from tiny import model, prompt, relative, shared

import kvevict
from kvevict.engine.memory.layer import EvictionLayer
from kvevict.engine.read.budgets import places

# name -> (family, policy, options): only the prompt evicted, and evicting while decoding in several ways
CASES = {
    "snapkv": ("llama", "snapkv", dict(budget=10, window=4)), "adakv": ("llama", "adakv", dict(budget=10, window=4)),
    "pyramidkv": ("llama", "pyramidkv", dict(budget=10, window=4)), "h2o": ("llama", "h2o", dict(budget=10)),
    "tova": ("llama", "tova", dict(budget=10)),
    "snapkv decoding": ("llama", "snapkv", dict(budget=10, window=4, decode=True, interval=3)),
    "prompt kept": ("llama", "adakv", dict(budget=10, window=4, decode=True, interval=3, keep_prompt=True)),
    "take": ("llama", "take", dict(budget=10, probe=6, chunk_size=16)),
    "streaming": ("llama", "streaming", dict(budget=10, decode=False)),
    "keeps all": ("llama", "snapkv", dict(budget=4096)),
    "fastkv": ("llama", "fastkv", dict(budget=10, window=4, tsp_len=16)),
    "cake": ("llama", "cake", dict(budget=40, window=4)), "sliding": ("gemma3", "snapkv", dict(budget=10, window=4)),
    "sinks": ("gpt_oss", "h2o", dict(budget=10)), "softcap": ("gemma2", "snapkv", dict(budget=4096)),
}  # fmt: skip
pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture(params=CASES)
def case(request):
    """A patched model and a cache of 60 tokens that it read."""
    family, policy, options = CASES[request.param]
    net = shared(family)
    with kvevict.evicting(net, policy, **options):
        yield net, read(net)


def read(net, batch=1):
    return net(ids(batch, 60), logits_to_keep=1).past_key_values


def goes_on(net, cache, seed, tokens=14, batch=1):
    """Logits of a question and of the tokens decoded after it."""
    first = net(ids(batch, 7, seed), past_key_values=cache).logits
    return torch.cat([first, tokens_of(net, cache, first[:, -1:].argmax(-1), tokens)], 1)


def shares(fork, cache):
    """Whether every layer that is evicted from reads the storage of the other's."""
    pairs = [(a, b) for a, b in zip(fork.layers, cache.layers, strict=True) if isinstance(b, EvictionLayer)]
    return all(a.storage.prefix is not None and a.storage.prefix.k is b.storage.prefix.k for a, b in pairs)


def in_turn(net, ways, wanted):
    """All caches decode different tokens in turn, each like its deep copy."""
    for token in range(12):
        for way, (got, want) in enumerate(zip(ways, wanted, strict=True)):
            one = torch.tensor([[5 + token + 20 * way]])
            assert relative(net(one, past_key_values=got).logits, net(one, past_key_values=want).logits) < 1e-5


@pytest.mark.quick(case="take")
@pytest.mark.drawn(4)
def test_each_goes_on_as_a_deep_copy(case):
    """Forks, and the cache itself, one after the other, then token by token in turn."""
    net, cache = case
    before, plain = held(cache), copy.deepcopy(cache)
    for seed in (2, 3, 4):
        assert relative(goes_on(net, cache.fork(), seed), goes_on(net, copy.deepcopy(plain), seed)) < 1e-5
        assert same(held(cache), before)
    ways, wanted = [cache.fork(), cache.fork(), cache], [copy.deepcopy(plain) for _ in range(3)]
    in_turn(net, ways, wanted)
    for got, want in zip(ways, wanted, strict=True):
        assert [layer.get_seq_length() for layer in got.layers] == [layer.get_seq_length() for layer in want.layers]
        for mine, other in zip(got.layers, want.layers, strict=True):
            if isinstance(other, EvictionLayer):
                assert places(mine, False) == places(other, False)


@pytest.mark.parametrize("policy", ["snapkv", "tova"])
def test_what_was_kept_is_not_copied(policy):
    """With a budget that the question fits into; `tova` evicts while decoding, and copies only then."""
    with kvevict.evicting(model(), policy, budget=200) as net:
        cache = read(net)
        fork = cache.fork()
        assert shares(fork, cache)
        first = net(ids(1, 7, 2), past_key_values=fork).logits
        assert shares(fork, cache)
        seen = kvevict.report(net, positions=True)
        assert (seen["kept"][0], seen["positions"][0][0][0]) == ([[67, 67]], list(range(67)))
        assert shares(fork, cache)  # the report looked at tails
        tokens_of(net, fork, first[:, -1:].argmax(-1), 100)
        assert shares(fork, cache) == (policy == "snapkv")
        layer = fork.layers[0]
        assert (layer.storage.prefix is not None) == (policy == "snapkv")
        assert layer.live_bytes() == 2 * 4 * 32 * 2 * 167


@pytest.mark.parametrize("method", ["beams", "left padding", "repeated"])
def test_batches(method):
    """Reordered rows, a question with padding and repeated rows are right."""
    net = kvevict.patch(model(), "adakv", budget=200, window=4)
    cache = read(net, 2)
    fork, plain, before = cache.fork(), copy.deepcopy(cache), held(cache)
    asked = prompt(2, 7, 2, pad=(0, 3) if method == "left padding" else (0,))
    mask = torch.cat([torch.ones(2, 60, dtype=torch.long), asked["attention_mask"]], 1)
    results = []
    for way in (fork, plain):
        net(asked["input_ids"], attention_mask=mask, past_key_values=way)
        if method == "beams":
            way.reorder_cache(torch.tensor([1, 0]))
        if method == "repeated":
            way.batch_repeat_interleave(2)
        results.append(goes_on(net, way, 3, batch=4 if method == "repeated" else 2))
    assert relative(*results) < 1e-5
    assert same(held(cache), before)


def test_generate_with_beams():
    net = kvevict.patch(model(), "snapkv", budget=12, window=4)
    cache = net(ids(1, 60).repeat(3, 1), logits_to_keep=1).past_key_values
    ask = dict(inputs=ids(1, 7, 2), attention_mask=torch.ones(1, 67, dtype=torch.long), max_new_tokens=12, num_beams=3)
    want = net.generate(**ask, past_key_values=copy.deepcopy(cache))
    assert torch.equal(net.generate(**ask, past_key_values=cache.fork()), want)
    of_one_row = read(net)
    with pytest.raises(ValueError, match=r"1 rows, the input has 3: .* call batch_repeat_interleave\(3\) on the cache"):
        net.generate(**ask, past_key_values=of_one_row.fork())
    fork = of_one_row.fork()
    fork.batch_repeat_interleave(3)
    assert torch.equal(net.generate(**ask, past_key_values=fork), want)


@pytest.mark.parametrize("draft_keys", [False, True])
def test_a_draft_over_a_fork(draft_keys):
    """LAQ reads a question after a fork: the copy that drafts is made of the slots that are shared."""
    net = kvevict.patch(model(), "laq", budget=20, n_d=4, window=4, draft_keys=draft_keys)
    cache = read(net)
    before, plain = held(cache), copy.deepcopy(cache)
    assert relative(goes_on(net, cache.fork(), 2), goes_on(net, plain, 2)) < 1e-5
    assert same(held(cache), before)


def test_read_in_inference_mode():
    """A cache that was read and forked there continues outside of it."""
    net = kvevict.patch(model(), "snapkv", budget=100)
    with torch.inference_mode():
        cache = read(net)
        fork, plain = cache.fork(), copy.deepcopy(cache)
        for way in (fork, plain):
            net(ids(1, 7, 2), past_key_values=way)
    assert relative(goes_on(net, fork, 3), goes_on(net, plain, 3)) < 1e-5


def test_a_cache_that_holds_nothing():
    net = kvevict.patch(model(), "snapkv", budget=12, window=4)
    empty = read(net)
    empty.reset()
    goes_on(net, empty.fork(), 2)
    assert empty.get_seq_length() == 0
