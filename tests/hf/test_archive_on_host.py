"""Archives in the host's memory, of a model on another device: here the same, with the copies made as between two."""

import weakref

import pytest
import torch
from recalling import POLICIES, SNAPKV

from kvevict.engine.slots import host

KINDS = {kind: SNAPKV | dict(kv=kind) for kind in ("int8", "k8v4", "int4")}
MORE = {"pooled": SNAPKV | dict(policy="adakv", layers="pooled"), "take": dict(POLICIES["take+edie"], policy="take")}
ALL = POLICIES | KINDS


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


class Copies:
    """Counts the copies "on the device": all that were made, and the most at once."""

    def __init__(self, monkeypatch):
        self.made, self.most = [], 0
        real = host.beside

        def beside(far, capacity):
            copied = real(far, capacity)
            self.made.append(weakref.ref(copied.k))
            self.most = max(self.most, sum(each() is not None for each in self.made))
            return copied

        monkeypatch.setattr(host, "beside", beside)


@pytest.fixture
def copies(monkeypatch):
    monkeypatch.setattr(host, "is_away", lambda device: True)
    return Copies(monkeypatch)


def ours(cache):
    return [layer for layer in cache.layers if isinstance(layer, EvictionLayer)]


def same(one, other):
    """The same kept slots, and the same archives, bit by bit."""
    for mine, theirs in zip(ours(one), ours(other), strict=True):
        assert places(mine, False) == places(theirs, False)
        assert torch.equal(mine.keys, theirs.keys) and torch.equal(mine.values, theirs.values)
        assert mine.archive.on_host and not theirs.archive.on_host
        if isinstance(mine.archive, type(theirs.archive)) and hasattr(mine.archive, "places"):
            rows, heads = mine.counts.shape
            for b in range(rows):
                for h in range(heads):
                    for name in ("k", "v", "pos"):
                        parts = [
                            torch.cat([getattr(s, name)[at] for s, at in a.places(b, h)])
                            for a in (mine.archive, theirs.archive)
                        ]
                        assert torch.equal(*parts)


def conversation(model, options):
    """The logits of a text, and of turns on it and on a fork; both caches."""
    outs = []
    with kvevict.evicting(model, **options):
        cache = model(prompt(1, 90)["input_ids"], logits_to_keep=1).past_key_values
        fork = cache.fork()
        for seed, each in enumerate([cache, fork, cache, fork, cache], 1):
            outs.append(model(prompt(1, 40, seed=seed)["input_ids"], **{CACHE: each}, logits_to_keep=1).logits)
            outs.append(decoded(model, each).logits)
    return torch.cat(outs), cache, fork


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ALL)
def test_as_on_the_device(name, dtype, copies):
    model = shared().to(dtype) if dtype == torch.float32 else copy.deepcopy(shared()).to(dtype)
    want, *caches = conversation(model, ALL[name])
    assert not copies.made
    got, *others = conversation(model, ALL[name] | dict(recall="memory"))
    assert torch.equal(got, want) and copies.made
    for one, other in zip(others, caches, strict=True):
        same(one, other)
    if name != "cake":
        assert copies.most <= 2
    assert kvevict.report(others[0])["archive_in"] == "cpu"
    assert all(each() is None for each in copies.made)
