"""Recall with a single choice, at the prompt's end: each chunk attends to all slots, which lie in the archive alone."""

import pytest
import torch
import zoo
from recalling import OTHERS, PACKED, POLICIES, every
from tiny import prompt, relative, shared
from torch.nn.functional import pad

import kvevict
from kvevict.models.compat import CACHE, cache_of

pytestmark = pytest.mark.usefixtures("no_grad")
CHUNKED = {name: options for name, options in POLICIES.items() if options.get("chunk_size")}


def read(model, options, padded=0, **more):
    """A prompt of several chunks, a turn of several chunks, and a token: logits of each, and the cache."""
    ids, turn = prompt(2, 150)["input_ids"], prompt(2, 90, seed=1)["input_ids"]
    ids[1, :padded], mask = 0, torch.ones(2, 150, dtype=torch.long)
    mask[1, :padded] = 0
    with kvevict.evicting(model, **options | more):
        out = model(ids, attention_mask=mask, use_cache=True, logits_to_keep=1)
        cache, logits = cache_of(out), [out.logits]
        for tokens in (turn, turn[:, :1]):
            mask = pad(mask, (0, tokens.shape[1]), value=1)
            logits.append(model(tokens, attention_mask=mask, **{CACHE: cache}, logits_to_keep=1).logits)
    return torch.cat(logits, 1), cache


@pytest.mark.parametrize("padded", [0, 70])
@pytest.mark.parametrize("name", CHUNKED)
def test_chunks_read_as_without_eviction(name, padded, tmp_path):
    """A read's logits are those of a cache that lost nothing, and each layer keeps what the budget allows."""
    model, options = shared(), CHUNKED[name]
    kind = options.get("recall_kv") or options.get("kv", "model")
    want, _ = read(model, dict(policy="snapkv", budget=4096, chunk_size=32, kv=kind), padded)
    lost, _ = read(model, options, padded)
    for place in (True, str(tmp_path)):
        got, cache = read(model, options, padded, schedule="prompt", recall=place)
        assert (
            relative(got[:, :2], want[:, :2]) < (0.02 if name in PACKED else 1e-5) < relative(lost[:, :2], want[:, :2])
        )
        kept = [cache.tiers.kept(at).total_counts.sum(1) for at in cache.tiers.layers]
        assert (sum(kept) <= 4 * 2 * (24 + 3)).all() and every(cache)[0].total_counts.max() >= 240


def test_slots_lie_in_the_archive_alone():
    """Beside it the layers have one chunk."""
    model, own, options = shared(), [], CHUNKED["snapkv"] | dict(schedule="prompt")

    def note(module, args, kwargs):
        cache = kwargs[CACHE]
        own.append([0 if layer.counts is None else int(layer.storage.counts.max()) for layer in cache.layers])

    hook = model.base_model.layers[0].register_forward_pre_hook(note, with_kwargs=True)
    try:
        _, cache = read(model, options)
    finally:
        hook.remove()
    assert len(own) > 6 and max(map(max, own[:-1])) <= options["chunk_size"]
    assert all(archive.total_counts.min() >= 240 for archive in every(cache))


@pytest.mark.parametrize("name, kind", [pytest.param(*each, id=each[0]) for each in zoo.types() if each[0] in OTHERS])
def test_other_models(name, kind):
    """Windows, states and latents beside or in place of slots."""
    model = zoo.make(name, kind)
    options = dict(policy="snapkv", budget=24, window=4, chunk_size=32, recall=True, schedule="prompt")
    ids, logits = prompt(1, 150)["input_ids"], []
    for more in (options, dict(policy="snapkv", budget=4096, chunk_size=32)):
        with kvevict.evicting(model, **more):
            logits.append(model(ids, use_cache=True, logits_to_keep=1).logits)
    assert relative(*logits) < 1e-4
