"""Policies that recall, and what their layers attend with."""

from unittest import mock

import torch
from torch.nn.functional import pad

from kvevict.engine.hook import attention as hook
from kvevict.engine.memory.layer import EvictionLayer
from kvevict.models.compat import CACHE

SNAPKV = dict(policy="snapkv", budget=24, window=4, kernel=1, chunk_size=32, recall=True, recall_after=0)
IN_8_BITS = "archive in 8 bits"
POLICIES = {
    "snapkv": SNAPKV,
    "take+edie": dict(
        policy="take+edie", budget=24, probe=4, chunk_size=32, recall=True, recall_after=0, tokenizer=False
    ),
    "one pass": SNAPKV | dict(chunk_size=None),
    "int8": SNAPKV | dict(kv="int8"),
    IN_8_BITS: SNAPKV | dict(recall_kv="int8"),
    "ada": SNAPKV | dict(policy="adakv"),
    "cake": SNAPKV | dict(policy="cake"),
    "laq": dict(policy="laq", budget=24, window=4, recall=True, recall_after=0),
    "after": SNAPKV | dict(recall_after=3),
    "decode": SNAPKV | dict(decode=True, interval=3),
    f"decode, {IN_8_BITS}": SNAPKV | dict(decode=True, interval=3, recall_kv="int8"),
}
PACKED = "int8", IN_8_BITS, f"decode, {IN_8_BITS}"
OTHERS = ("gemma3_text", "qwen3_next", "deepseek_v3", "falcon_h1", "gpt_oss")  # windows, states, latents, sinks


def decoded(model, cache, tokens=(5, 6, 7)):
    for token in tokens:
        out = model(torch.full((len(cache.sequence.seen), 1), token), **{CACHE: cache})
    return out


def every(cache):
    """Each layer's slots of all tokens; [] without recall."""
    return [slots for _, slots in sorted(cache.tiers.every.items())]


def ours(cache):
    return [layer for layer in cache.layers if isinstance(layer, EvictionLayer)]


def padded(rows):
    """Token ids and mask of rows of different lengths, padded at the left."""
    most = max(map(len, rows))
    return [torch.stack([pad(x, (most - len(x), 0)) for x in part]) for part in (rows, map(torch.ones_like, rows))]


class Heard:
    """Inside, what each layer of a call attends with, as it was computed: {layer: [(q, k, v), ..]}."""

    def __enter__(self):
        self.calls: dict = {}
        attend = hook.attend

        def heard(seen):
            stop = seen.k.shape[2] - seen.step.appended
            parts = seen.q, seen.k[:, :, :stop], seen.v[:, :, :stop]
            self.calls.setdefault(seen.module.layer_idx, []).append([x.clone() for x in parts])
            return attend(seen)

        self.patch = mock.patch.object(hook, "attend", heard)
        self.patch.start()
        return self

    def __exit__(self, *error):
        self.patch.stop()

    def all(self, layer, part):
        return torch.cat([call[part] for call in self.calls[layer]], 2)
