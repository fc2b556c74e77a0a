"""Policies that recall."""

import torch

from kvevict.compat import CACHE

SNAPKV = dict(policy="snapkv", budget=24, window=4, kernel=1, chunk_size=32, recall=True)
POLICIES = {
    "snapkv": SNAPKV,
    "take+edie": dict(policy="take+edie", budget=24, probe=4, chunk_size=32, recall=True, tokenizer=False),
    "one pass": SNAPKV | dict(chunk_size=None),
    "int8": SNAPKV | dict(kv="int8"),
    "ada": SNAPKV | dict(policy="adakv"),
    "cake": SNAPKV | dict(policy="cake"),
    "laq": dict(policy="laq", budget=24, window=4, recall=True),
    "decode": SNAPKV | dict(decode=True, interval=3),
}


def decoded(model, cache, tokens=(5, 6, 7)):
    for token in tokens:
        out = model(torch.full((len(cache.sequence.seen), 1), token), **{CACHE: cache})
    return out
