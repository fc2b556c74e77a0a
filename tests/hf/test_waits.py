"""How often the host waits for the device: per layer, by calls of models of two depths. On a CPU nothing waits, so the
operations that would wait on a GPU are counted: numbers read from tensors, masks turned into indices, numbers put into
tensors."""

import collections
import contextlib
import functools

import pytest
import tiny
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kvevict

READS = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select", "aten::is_nonzero"}
UPLOADS = {"aten::lift_fresh", "aten::lift_fresh_copy"}  # torch.tensor and torch.as_tensor of numbers


class Waits(TorchDispatchMode):
    """Counts by kind, but for `_ops.upload` (it does not wait) and `layer_slots` (its tensors are on the CPU)."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.counts, tolist = collections.Counter(), torch.Tensor.tolist

        def counted(tensor):
            self.counts["tolist"] += 1
            return tolist(tensor)

        monkeypatch.setattr(torch.Tensor, "tolist", counted)
        for module, name in ((kvevict.ops._ops, "upload"), (kvevict.engine.read.budgets, "layer_slots")):
            monkeypatch.setattr(module, name, functools.partial(self.uncounted, getattr(module, name)))

    def __enter__(self):
        self.counts.clear()
        return super().__enter__()

    def uncounted(self, function, *args):
        before = self.counts.copy()
        result = function(*args)
        self.counts = before
        return result

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        masks = name in ("aten::index", "aten::index_put", "aten::index_put_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        scalars = name == "aten::where" and any(arg.ndim == 0 for arg in args)  # brought to the device one by one
        if name in READS or name in UPLOADS or masks or scalars:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def per_layer(monkeypatch, decoding, policy, of=lambda cache: cache, **options):
    """Waits per layer and chunk, or per layer and decoded token; both evict. of: the cache that decoding continues."""
    found = {}
    for layers in (4, 8):
        model = kvevict.patch(tiny.model(num_hidden_layers=layers), policy, **options)
        inputs = tiny.prompt(2, 96, pad=(0, 5))
        with torch.no_grad(), monkeypatch.context() as patched:
            waits = Waits(patched)
            with contextlib.nullcontext() if decoding else waits:
                cache = model(**inputs, use_cache=True, logits_to_keep=1).past_key_values
            if decoding:
                cache = of(cache)
                with waits:
                    for _ in range(8):
                        model(torch.ones(2, 1, dtype=torch.long), past_key_values=cache)
        found[layers] = waits.counts
    calls = 8 if decoding else 4
    return {name: n / 4 / calls for name in found[8] if (n := found[8][name] - found[4][name])}


@pytest.mark.parametrize("policy", ["take:warmup_layers=none", "snapkv", "adakv", "edie"])
def test_plain_decoding_waits_for_nothing(monkeypatch, policy):
    small = dict(probe=4) if policy.startswith("take") else dict(window=4)
    assert per_layer(monkeypatch, True, policy, budget=16, chunk_size=24, **small) == {}


# The remaining waits by layer and evicting chunk (docs/performance.md). If heads compete: the number of the best slots,
# in all and of each head. With "ada" also whether a head got more slots than it has.
CHUNKED = {
    "take:warmup_layers=none": (dict(probe=4), 0), "snapkv": (dict(window=4), 0), "h2o": ({}, 0), "streaming": ({}, 0),
    "edie": (dict(window=4, heads="equal"), 0), "adakv": (dict(window=4), 4),
}  # fmt: skip


@pytest.mark.parametrize("policy", CHUNKED)
def test_what_an_evicting_chunk_waits_for(monkeypatch, policy):
    options, most = CHUNKED[policy]
    assert sum(per_layer(monkeypatch, False, policy, budget=16, chunk_size=24, **options).values()) <= most


@pytest.mark.parametrize("policy", ["streaming", "h2o", "tova"])
def test_evicting_while_decoding_waits_for_nothing(monkeypatch, policy):
    assert per_layer(monkeypatch, True, policy, budget=16) == {}
    assert per_layer(monkeypatch, True, policy, budget=16, interval=8) == {}


def test_competing_heads_wait_for_their_counts(monkeypatch):
    assert sum(per_layer(monkeypatch, True, "h2o", budget=16, heads="flat").values()) <= 2


def test_a_forks_tokens_wait_for_nothing(monkeypatch):
    small = dict(budget=16, chunk_size=24, window=4, decode=False)
    assert per_layer(monkeypatch, True, "snapkv", of=lambda cache: cache.fork(), **small) == {}


def test_chunks_that_are_only_stored_wait_for_nothing(monkeypatch):
    assert per_layer(monkeypatch, False, "snapkv", budget=200, window=4, chunk_size=24) == {}
