"""CAKE's layer budget and its cascade: the float64 oracle cuts every layer once, after all were read."""

import itertools

import pytest
import tiny
import torch
from choices import CHUNKED
from policy_cases import BUDGET, CHUNK, compare, model, ours

import kvevict
from kvevict.engine.memory.storage import ROOM
from kvevict.engine.read.choosers import Deciding
from kvevict.policy.building import build
from kvevict.policy.layers import layer_slots


def test_many_layers():
    compare(model(num_hidden_layers=7), "cake", [[53]], window=5, budget=BUDGET)


@pytest.mark.parametrize("n", [1, 2, BUDGET, BUDGET + 1, 2 * CHUNK + 1])
def test_lengths(n):
    """Also chunks of one row: their attention has no variance, so the layers are alike."""
    compare(model(), "cake", [[n, 1]], window=3, **CHUNKED)


def test_evicting_at_the_end_of_chunks():
    compare(model(), "cake", [[47, 1]], window=4, budget=BUDGET, chunk_size=CHUNK, schedule="prompt")


@pytest.mark.parametrize("seed", range(5))
def test_slots_are_the_source_s(seed):
    """Whole parts of P / sum(P) * (B - w) * L; the source gives the remainder one by one from the first layer on. Only
    the layers that are rounded up differ."""
    layers, heads, budget, window = 32, 8, 512, 32
    policy = build("cake", budget=budget)
    preference = torch.rand(layers, generator=torch.Generator().manual_seed(seed), dtype=torch.double) + 0.1
    total = (budget - window) * layers
    theirs = (preference / preference.sum() * total).long()
    theirs += torch.arange(layers) < total - theirs.sum()
    alive = torch.full((layers, 1), 100000 * heads)
    mine = layer_slots(policy, layers, heads, [100000], alive, [preference.tolist()])[:, 0]
    assert int(mine.sum()) == budget * layers * heads
    assert ((mine / heads - window - theirs).abs() <= 1).all()


def test_what_a_layer_cannot_use_goes_to_the_others():
    """16 slots beyond the window's 4 for each of 3 layers of one head: 16 : 8 : 24 of 48, but the last has 12 alive."""
    policy, alive = build("cake", budget=20, window=4), torch.tensor([[50], [50], [12]])
    slots = layer_slots(policy, 3, 1, [99], alive, [[2.0, 1.0, 3.0]])[:, 0].tolist()
    assert slots == [4 + 27, 4 + 13, 12]  # 40 left are split 2 : 1


def watched(monkeypatch):
    """Slots of every layer, after each layer of each chunk: [cut][layer]."""
    seen, cut = [], Deciding.layer

    def note(self, call):
        cut(self, call)
        if self.decisions.asks:
            seen.append([int(layer.len.sum()) for layer in call.step.cache.layers if layer.is_initialized])

    monkeypatch.setattr(Deciding, "layer", note)
    return seen


@pytest.mark.parametrize("heads", ["equal", "flat", "ada"])
def test_layers_read_so_far_share_the_whole_budget(monkeypatch, heads):
    """C slots and one per head, from the moment that there are as many; no layer gets any back."""
    made, L, Hkv, B, N = tiny.model(num_hidden_layers=8), 8, 2, 16, 300
    seen = watched(monkeypatch)
    with kvevict.evicting(made, "cake", budget=B, window=4, heads=heads):
        tiny.generate(made, tiny.prompt(1, N), new=1)
        report = kvevict.report(made)
    C, extra = B * L * Hkv, 0.2 * B * L * Hkv if heads == "ada" else 0
    for layer, slots in enumerate(seen[:-1]):
        assert sum(slots) <= C + (layer + 1) * Hkv + extra
        assert sum(slots) >= C - (L - 1 - layer) * 4 * Hkv  # the least that the others' windows will need
    assert sum(seen[-1]) == C
    for before, after in itertools.pairwise(seen):
        assert all(a <= b for b, a in zip(before, after))
    row = 2 * 4 * 32
    assert report["peak_cache_bytes"] <= row * (C + L * Hkv + extra + N * Hkv)
    assert report["cache_bytes"] == row * C


def test_chunks_hold_at_most_two_budgets_and_a_chunk():
    """Later layers' slots of earlier chunks come on top, so the peak does not grow with the prompt."""
    made, L, Hkv, B, Z, slot = tiny.shared(), 4, 2, 16, 24, 2 * 4 * 32
    for N in (10 * Z, 40 * Z):
        with kvevict.evicting(made, "cake", budget=B, window=4, chunk_size=Z):
            tiny.generate(made, tiny.prompt(1, N), new=1)
            report = kvevict.report(made)
        assert report["peak_cache_bytes"] <= slot * Hkv * (2 * B * L + L + Z)
        assert report["cache_bytes"] + report["overhead_bytes"] < 2.1 * slot * Hkv * L * (B + ROOM)


def test_every_layer_is_scored_once_a_chunk(monkeypatch):
    """A layer that is cut again is ranked by the scores it had."""
    calls, score = [], kvevict.SCORES["cake"].score

    def note(self, slots, *given):
        calls.append(slots.index)
        return score(self, slots, *given)

    monkeypatch.setattr(kvevict.SCORES["cake"], "score", note)
    ours(model(), "cake", [[3 * CHUNK]], 0, window=4, **CHUNKED)
    assert calls == [0, 1, 2, 3] * 2  # the first chunk fits


def test_two_runs_are_bitwise_equal():
    chosen = dict(window=4, heads="ada", decode=True, interval=2, **CHUNKED)
    (first, *_), (second, *_) = (ours(model(), "cake", [[40, 1, 1], [23, 1, 1]], 3, **chosen)[-1:] for _ in range(2))
    for (logits, positions), (again, same) in zip(first, second):
        assert torch.equal(logits, again) and positions == same
