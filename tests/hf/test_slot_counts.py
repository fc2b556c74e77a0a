"""Slot counts in fixed memory: one count a decoded token for all layers, and addresses that do not change."""

from unittest import mock

import pytest
import torch
from tiny import prompt, relative, shared
from transformers import DynamicCache

import kvevict
from kvevict.engine.memory.storage import ROOM
from kvevict.engine.memory.table import Counts
from kvevict.ops import _ops

BOUNDED = {
    "streaming": {}, "h2o": {}, "tova": {}, "h2o+caote": {}, "snapkv": dict(decode=True, interval=16),
    "take+edie": dict(decode=True, interval=16), "keydiff": dict(decode=True, interval=7, kv="int8"),
}  # fmt: skip
pytestmark = pytest.mark.usefixtures("no_grad")


def told(model, cache, tokens):
    """Addresses of the stored slots that the decode op gets, {(what, ...)}, while tokens are decoded."""
    found, op = [], _ops.decode

    def decode(q, k, v, pos, held, *rest, **options):
        parts = (held.k, held.v, held.pos, held.offset, held.len, held.centre)
        found.append(tuple(None if each is None else each.data_ptr() for each in parts))
        return op(q, k, v, pos, held, *rest, **options)

    with mock.patch.object(_ops, "decode", decode):
        for token in range(tokens):
            model(torch.tensor([[5 + token % 80]]), past_key_values=cache)
            for layer in cache.layers:
                assert layer.counts.tolist() == layer.len.tolist()
    return found


@pytest.mark.parametrize("name", BOUNDED)
def test_addresses_stay_for_200_tokens(name):
    model = shared()
    with kvevict.evicting(model, name, budget=48, **BOUNDED[name]):
        cache = model(prompt(1, 120)["input_ids"], logits_to_keep=1).past_key_values
        layers = len(cache.layers)
        told(model, cache, 20)  # the first cuts size the buffers
        found = told(model, cache, 200)
    assert len(found) == 200 * layers
    assert len(set(found)) == layers


def test_one_count_for_all_layers():
    """Without a cut a layer costs no count of its own, and buffers move only where their room ends."""
    model = shared()
    with kvevict.evicting(model, "snapkv", budget=48):
        cache = model(prompt(1, 120)["input_ids"], logits_to_keep=1).past_key_values
        with mock.patch.object(Counts, "hold", autospec=True, side_effect=Counts.hold) as hold:
            found = told(model, cache, ROOM + 10)
        assert hold.call_count == 2 * len(cache.layers)
    assert len(set(found)) == 2 * len(cache.layers)
    assert cache.layers[0].len.tolist() == [[48 + ROOM + 10] * 2]


@pytest.mark.parametrize("kind", ["model", "int8"])
def test_a_token_after_a_prefix_that_was_read_unpatched(kind):
    """Slots are packed in the call that decodes the first token, before the layer counts it."""
    model, ids = shared(), prompt(2, 40)["input_ids"]
    plain = model(ids, past_key_values=DynamicCache(config=model.config)).past_key_values
    got = []
    with kvevict.evicting(model, "snapkv", budget=4096, kv=kind):
        for token in (5, 6):
            got.append(model(torch.tensor([[token], [token]]), past_key_values=plain).logits)
    want = model(torch.cat([ids, torch.tensor([[5, 6], [5, 6]])], 1)).logits[:, -2:]
    assert relative(torch.cat(got, 1), want) < (1e-5 if kind == "model" else 0.1)
    for layer in plain.layers:
        assert layer.counts.tolist() == layer.len.tolist() == [[42, 42]] * 2


def test_forks_and_their_cache_count_apart():
    model = shared()
    with kvevict.evicting(model, "snapkv", budget=48):
        cache = model(prompt(1, 120)["input_ids"], logits_to_keep=1).past_key_values
        told(model, cache, 3)
        fork = cache.fork()
        twin = fork.fork()
        for each, tokens in ((cache, 2), (fork, 5), (twin, 1), (cache, 4), (fork, 1)):
            told(model, each, tokens)
        alone = model(prompt(1, 120)["input_ids"], logits_to_keep=1).past_key_values
        told(model, alone, 3)
        told(model, alone, 2)
    assert [each.layers[1].len.tolist() for each in (cache, fork, twin)] == [[[n, n]] for n in (57, 57, 52)]
    assert torch.equal(alone.layers[2].keys, cache.layers[2].keys[:, :, :53])


def test_a_turn_between_two_tokens_takes_room():
    """Its slots are appended in place, where decoded tokens were to go."""
    model = shared()
    with kvevict.evicting(model, "snapkv", budget=4096):
        cache = model(prompt(1, 50)["input_ids"], logits_to_keep=1).past_key_values
        for turn in (60, 3, 40, 30):
            told(model, cache, 3)
            model(prompt(1, turn, seed=turn)["input_ids"], past_key_values=cache, logits_to_keep=1)
        told(model, cache, 70)
    assert all(layer.len.tolist() == [[50 + 12 + 133 + 70] * 2] for layer in cache.layers)
