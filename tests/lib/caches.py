"""Conversations with a cache, and what it holds."""

import torch
from tiny import prompt

from kvevict.engine.memory.layer import EvictionLayer


def ids(batch, length, seed=1):
    return prompt(batch, length, seed)["input_ids"]


def tokens_of(net, cache, first, count):
    out = [net(first, past_key_values=cache).logits]
    for _ in range(count - 1):
        out.append(net(out[-1][:, -1:].argmax(-1), past_key_values=cache).logits)
    return torch.cat(out, 1)


def kept(cache):
    """[layer][row][kv head] -> positions; None for layers with a sliding window."""
    layers = []
    for layer in cache.layers:
        own = hasattr(layer, "segments")
        layers.append([[[] for _ in row] for row in layer.len] if own else None)
        for b, h, rows in layer.segments() if own else ():
            layers[-1][b][h] = layer.pos[rows].tolist()
    return layers


def held(cache):
    """All that a cache holds, by layers of tensors. Looking changes nothing."""
    layers = []
    for layer in cache.layers:
        if isinstance(layer, EvictionLayer):
            slots = layer.storage.gathered()
            rows = [rows for _, _, rows in slots.segments()]
            kinds = [t[at].clone() for t in (slots.k, slots.v, slots.pos) for at in rows]
            layers.append([*kinds, torch.tensor(cache.sequence.seen), *([] if layer.carry is None else [layer.carry])])
        else:
            layers.append([layer.keys, layer.values, torch.tensor(layer.cumulative_length)])
    return layers


def same(a, b):
    return all(torch.equal(x, y) for mine, other in zip(a, b, strict=True) for x, y in zip(mine, other, strict=True))
