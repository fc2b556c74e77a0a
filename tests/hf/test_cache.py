"""The cache layer, by the methods that Transformers calls, against a plain list of tensors."""

import itertools
from unittest import mock

import numpy as np
import pytest
import torch
from tiny import VERSION, prompt, relative, shared
from transformers import DynamicCache

import kvevict
from kvevict.engine.memory.carried import of_layer, wide
from kvevict.engine.memory.layer import EvictionLayer
from kvevict.engine.memory.meter import allocated_bytes
from kvevict.engine.memory.sequence import Sequence
from kvevict.engine.memory.stateful import StatefulLayer
from kvevict.engine.memory.storage import ROOM
from kvevict.engine.read.budgets import places

D = 32


def columns(batch, heads, n, seed):
    """New keys, values [B, Hkv, n, D] and their positions [B, n]."""
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, batch, heads, n, D, generator=generator)
    return k, v, torch.arange(n, dtype=torch.int32).expand(batch, n).contiguous()


def layer_of(lens, seed=0):
    """A layer with lens[b][h] slots, and its content: {(b, h): (keys, values, positions)}."""
    batch, heads, most = len(lens), len(lens[0]), max(map(max, lens))
    k, v, pos = columns(batch, heads, most, seed)
    layer = EvictionLayer(Sequence())
    layer.lazy_initialization(k)
    layer.append(k, v, pos, torch.zeros(batch, dtype=torch.int32), np.zeros(batch, int))
    layer.sequence.coming = most, most
    layer.sequence.advance()
    keep = torch.tensor(lens, dtype=torch.int32)
    index = torch.arange(most, dtype=torch.int32).expand(batch, heads, most)
    index = torch.where(index < keep[..., None], index, -1).contiguous()
    layer.keep(index, keep.numpy())
    held = {(b, h): (k[b, h, :n], v[b, h, :n], pos[b, :n]) for b, row in enumerate(lens) for h, n in enumerate(row)}
    return layer, held


def holds(layer, held):
    assert {(b, h) for b, h, _ in layer.segments()} == set(held)
    for b, h, rows in layer.segments():
        assert rows.stop - rows.start == int(layer.len[b, h]) <= int(layer.storage.capacity[b, h])
        for got, want in zip((layer.k[rows], layer.v[rows], layer.pos[rows]), held[b, h], strict=True):
            assert torch.equal(got, want)
    assert layer.counts.tolist() == layer.len.tolist()
    spans = sorted((int(o), int(o + c)) for o, c in zip(layer.offset.flatten(), layer.storage.capacity.flatten()))
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))  # heads do not overlap
    assert spans[-1][1] <= len(layer.k) == len(layer.v) == len(layer.pos)


RAGGED = [[5, 0], [3, 9], [1, 7]]


@pytest.mark.parametrize("rows", [[0, 1, 2], [2, 0, 1], [1, 1, 1], [0, 2], [2, 2, 1, 0, 0], [0]])
def test_reorder_and_select(rows):
    layer, held = layer_of(RAGGED)
    layer.carry = of_layer(torch.arange(3 * 2 * 9.0).view(3, 2, 9), layer)
    layer.budget = np.array([10, 11, 12])
    want = layer.carry[rows][..., : max(n for row in rows for n in RAGGED[row])]
    layer.select(rows)
    holds(layer, {(b, h): held[row, h] for b, row in enumerate(rows) for h in range(2)})
    torch.testing.assert_close(layer.carry, want, rtol=0, atol=0, equal_nan=True)
    ends = [[int((~head.isnan()).sum()) for head in row] for row in layer.carry]
    assert ends == [RAGGED[row] for row in rows]
    assert layer.budget.tolist() == [10 + row for row in rows]
    assert layer.get_seq_length() == 9


@pytest.mark.parametrize("mask", [[True, False, True], [False, False, True], [True, True, True]])
def test_select_by_mask(mask):
    cache, whole = (read(shared(), rows=3) for _ in range(2))
    for select in ("reorder_cache", "batch_select_indices"):
        cache = read(shared(), rows=3)
        getattr(cache, select)(torch.tensor(mask))
        assert len(cache.sequence.seen) == sum(mask)
        for layer, before in zip(cache.layers, whole.layers, strict=True):
            assert torch.equal(layer.keys, before.keys[mask]) and torch.equal(layer.values, before.values[mask])


def test_dense_view():
    layer, held = layer_of(RAGGED)
    for dense, part in ((layer.keys, 0), (layer.values, 1)):
        assert dense.shape == (3, 2, 9, D)
        for (b, h), kept in held.items():
            n = len(kept[part])
            assert torch.equal(dense[b, h, :n], kept[part])
            assert not dense[b, h, n:].any()
    layer.keys.zero_()  # a copy
    holds(layer, held)
    assert layer.live_bytes() == 2 * 4 * D * sum(map(sum, RAGGED))
    assert EvictionLayer(Sequence()).keys is None


def test_append():
    """After every head's slots, without each row's padding."""
    layer, held = layer_of(RAGGED)
    first = torch.tensor([0, 2, 6], dtype=torch.int32)
    k, v, pos = columns(3, 2, 6, 1)
    layer.append(k, v, pos, first, first.numpy())
    for (b, h), old in held.items():
        new = k[b, h, first[b] :], v[b, h, first[b] :], pos[b, first[b] :]
        held[b, h] = tuple(torch.cat(pair) for pair in zip(old, new))
    holds(layer, held)


@pytest.mark.parametrize("step", [1, 7])
def test_append_is_amortised(step):
    """Ten thousand tokens move the cache a few dozen times, not ten thousand."""
    layer, moves, wanted = EvictionLayer(Sequence()), 0, 10_000 // step
    k, v, pos = columns(2, 2, step, 0)
    layer.lazy_initialization(k)
    first = torch.zeros(2, dtype=torch.int32)
    for _ in range(wanted):
        before = layer.k.data_ptr()
        layer.append(k, v, pos, first, first.numpy())
        moves += layer.k.data_ptr() != before
    assert layer.longest() == wanted * step
    assert moves < 50
    assert int(layer.storage.capacity.sum()) <= 1.2 * int(layer.len.sum()) + 4 * ROOM


def test_decoding_is_amortised():
    layer, moves = layer_of([[5, 5]])[0], 0
    k, v, _ = columns(1, 2, 1, 3)
    for position in range(3000):
        before = layer.k.data_ptr()
        layer.tick()
        layer.decode(k, k, v, torch.full((1, 1), position, dtype=torch.int32), scale=1.0)
        moves += layer.k.data_ptr() != before
    assert layer.len.tolist() == [[3005, 3005]]
    assert moves < 50


def test_kept_memory_is_given_back():
    """After an eviction the layer is as large as its kept slots, with a little room."""
    layer, _ = layer_of([[5000, 5000]])
    index = torch.arange(0, 5000, 500, dtype=torch.int32).expand(1, 2, 10).contiguous()
    before = layer.keys
    layer.keep(index, np.array([[10, 4]]))
    assert torch.equal(layer.keys[0, 0], before[0, 0, ::500])
    assert torch.equal(layer.keys[0, 1, :4], before[0, 1, :2000:500])
    assert allocated_bytes(layer) < 3 * (14 + 2 * ROOM) * (2 * D + 1) * 4


def test_keep_leaves_the_counts_of_others_alone():
    """Layers that share one choice (TAKE) count separately afterwards."""
    one, two = layer_of([[6, 6]])[0], layer_of([[6, 6]], seed=1)[0]
    index, keep = torch.tensor([[[0, 3], [1, 2]]], dtype=torch.int32), np.array([[2, 2]])
    k, v, _ = columns(1, 2, 1, 3)
    for layer in (one, two):
        layer.storage = layer.storage.as_prefix()  # so that the slots move to new buffers
        layer.keep(index, keep)
    two.append(*columns(1, 2, 3, 4), torch.zeros(1, dtype=torch.int32), np.zeros(1, int))
    one.tick()
    one.decode(k, k, v, torch.full((1, 1), 6, dtype=torch.int32), scale=1.0)
    assert (one.len.tolist(), two.len.tolist(), keep.tolist()) == ([[3, 3]], [[5, 5]], [[2, 2]])
    assert (one.counts.tolist(), two.counts.tolist()) == ([[3, 3]], [[5, 5]])


def test_reset():
    layer, _ = layer_of(RAGGED)
    layer.reset()
    assert not layer.is_initialized
    assert layer.keys is None
    assert layer.live_bytes() == allocated_bytes(layer) == 0
    cache = read(shared())
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.sequence.seen is None
    for method, argument in (("crop", -1), ("reorder_cache", torch.tensor([0])), ("batch_repeat_interleave", 2)):
        getattr(cache, method)(argument)  # nothing to do
        with pytest.raises(ValueError, match="its EvictionCache"):
            getattr(layer, method)(argument)


def test_unsupported():
    layer, _ = layer_of(RAGGED)
    for method in (layer.offload, layer.prefetch):
        with pytest.raises(NotImplementedError, match="cannot be offloaded"):
            method()
    with pytest.raises(RuntimeError, match=r"kvevict\.patch"):  # an unpatched model would attend over new tokens only
        layer.update(*columns(3, 2, 1, 0)[:2])
    assert not layer.is_compileable
    assert not layer.is_sliding


def read(model, length=40, rows=1, **options):
    cache = DynamicCache(config=model.config)
    with kvevict.evicting(model, **dict(policy="snapkv", budget=4096) | options), torch.no_grad():
        model(prompt(rows, length)["input_ids"], past_key_values=cache)
    return cache


def test_crop_removes_the_last_tokens():
    model = shared()
    cache = read(model)
    before = cache.layers[2].keys
    cache.crop(0 if VERSION >= (5, 17) else 40)
    assert cache.get_seq_length() == 40
    cache.crop(-3 if VERSION >= (5, 15) else 37)
    assert cache.get_seq_length() == 37
    for layer in cache.layers:
        assert layer.len.tolist() == [[37, 37]]
    assert cache.sequence.seen.tolist() == [37]
    assert torch.equal(cache.layers[2].keys, before[:, :, :37])
    more = prompt(1, 50)["input_ids"][:, 37:]
    with kvevict.evicting(model, "snapkv", budget=4096), torch.no_grad():
        got = model(more, past_key_values=cache).logits
    want = model(prompt(1, 50)["input_ids"]).logits[:, 37:]
    assert relative(got, want) < 1e-4


@pytest.mark.parametrize("length", [0, 1, 30, 40, 50])
def test_crop_to_a_length(length):
    """Up to 5.16 a positive number is the length to keep; later it is an error that names the change."""
    cache = read(shared())
    layer = cache.layers[0]
    if VERSION >= (5, 17) and length:
        with pytest.raises(ValueError, match=f"crop\\({length}\\).*negative"):
            cache.crop(length)
        assert layer.get_seq_length() == 40
    elif length:
        cache.crop(length)
        assert layer.get_seq_length() == min(length, 40)
        assert layer.len.tolist() == [[min(length, 40)] * 2]
    else:
        cache.crop(0)
        if VERSION >= (5, 15):
            assert layer.get_seq_length() == 40  # "remove nothing"


@pytest.mark.parametrize("count", [1, 5, 45])
def test_crop_does_not_bring_back_what_was_evicted(count):
    model = shared()
    cache = read(model, policy="snapkv", budget=10, window=4)
    with pytest.raises(ValueError, match="crop cannot remove"):
        cache.crop(-count)
    assert cache.get_seq_length() == 40
    with kvevict.evicting(model, "snapkv", budget=10, window=4), torch.no_grad():
        for token in range(3):  # decoded since then: can be taken back
            model(torch.tensor([[5 + token]]), past_key_values=cache)
    cache.crop(-3)
    with pytest.raises(ValueError, match="crop cannot remove"):
        cache.crop(-1)
    assert cache.get_seq_length() == 40
    assert cache.layers[0].len.tolist() == [[10, 10]]


CARRIED = {
    "kvzip": dict(policy="kvzip", budget=16, chunk_size=16), "kvzip+": dict(policy="kvzip+", budget=16),
    "read-twice": dict(policy="read-twice", budget=0.5), "read-once": dict(policy="read-once", budget=0.5),
    "compactor": dict(policy="compactor", budget=16), "max": dict(policy="snapkv", budget=16, window=4, carry="max"),
    "keep": dict(policy="adakv", budget=16, window=4, carry="keep", chunk_size=16),
}  # fmt: skip


@pytest.mark.quick(name="kvzip")
@pytest.mark.parametrize("name", CARRIED)
@torch.no_grad()
def test_what_was_cropped_was_never_there(name):
    """Tokens that were decoded, or read as candidates, and taken back leave no number: the next turn is as without."""
    model, options = shared(), CARRIED[name]
    with kvevict.evicting(model, **options):
        straight, detour = (model(prompt(1, 60)["input_ids"], logits_to_keep=1).past_key_values for _ in range(2))
        for token in (5, 6, 7, 8):
            model(torch.tensor([[token]]), past_key_values=detour)
        detour.crop(-3)
        detour.record_past = True
        model(torch.tensor([[9, 10, 11]]), past_key_values=detour, logits_to_keep=3)
        detour.record_past = False
        detour.crop(-3)
        model(torch.tensor([[5]]), past_key_values=straight)
        for one, other in zip(straight.layers, detour.layers, strict=True):
            assert one.carry is not None and places(one, False) == places(other, False)
            ours, theirs = (wide(layer.carry, layer.longest()) for layer in (one, other))
            assert torch.equal(ours.isnan(), theirs.isnan()) and torch.equal(ours.nan_to_num(), theirs.nan_to_num())
            assert ours[..., -1].isnan().any()  # the decoded token's
        turn = prompt(1, 30, seed=2)["input_ids"]
        logits = [model(turn, past_key_values=cache).logits for cache in (straight, detour)]
        assert torch.equal(*logits)
        assert [places(layer, False) for layer in straight.layers] == [places(layer, False) for layer in detour.layers]


def test_crop_is_of_all_layers_or_of_none():
    cache = read(shared())
    third = mock.patch.object(EvictionLayer, "drop_last", side_effect=[None, None, ValueError("a state")])
    with third, pytest.raises(ValueError, match="a state"):
        cache.crop(-3)
    assert cache.get_seq_length() == 40 and [layer.len.tolist() for layer in cache.layers] == [[[40, 40]]] * 4
    cache.sequence.floor = 39
    with pytest.raises(ValueError, match="only the last 1 were read"):
        cache.crop(-3)
    cache.crop(-1)
    assert cache.get_seq_length() == 39 and [layer.len.tolist() for layer in cache.layers] == [[[39, 39]]] * 4


def test_crop_of_a_layer_with_a_state_is_refused():
    """Its state cannot be taken back, nor are the slots then."""
    cache = read(shared())
    both = StatefulLayer(cache.sequence, object())
    both.__dict__.update(cache.layers[3].__dict__)
    cache.layers[3] = both
    with pytest.raises(ValueError, match="a state beside its slots"):
        cache.crop(-1)
    cache.crop(0)
    assert [layer.len.tolist() for layer in cache.layers] == [[[40, 40]]] * 4 and cache.get_seq_length() == 40


def test_seen_is_not_kept():
    cache = read(shared(), policy="take", budget=10, probe=4, chunk_size=16)
    assert cache.get_seq_length() == 40
    for layer in cache.layers:
        assert layer.get_seq_length() == 40
        assert layer.get_mask_sizes(3) == (3, 40)
        assert layer.keys.shape[2] == 10


@pytest.mark.parametrize("policy", ["snapkv", "h2o"])
def test_filled_in_inference_mode_and_used_outside(policy):
    model, inputs = shared(), prompt(1, 50)
    logits = []
    with kvevict.evicting(model, policy, budget=40, chunk_size=40):
        for reading in (torch.no_grad, torch.inference_mode):
            with reading():
                cache = model(**inputs).past_key_values
            with torch.no_grad():
                steps = [model(torch.tensor([[token]]), past_key_values=cache).logits for token in range(5, 10)]
            logits.append(torch.cat(steps))
    assert torch.equal(*logits)
