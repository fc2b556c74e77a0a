"""Caches of several sequences that decode together. Joining and parting them moves no slot of a pool."""

import copy
from collections.abc import Sequence as Items
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from ...models import families
from . import archive
from .awaited import Awaited
from .cache import EvictionCache, adopt
from .carried import of_layer, wide
from .latent import LatentLayer
from .layer import EvictionLayer
from .pool import SlotPool
from .rows import Apart, joined, together
from .sequence import Sequence
from .stateful import states_of


class Pools:
    """A pool for each layer of a decoder that is evicted from, of `rows` slots over all heads."""

    def __init__(self, decoder: Any, rows: int) -> None:
        self.config, self.kinds = decoder.config, families.layer_kinds(decoder.config)
        self.of = {index: SlotPool(rows) for index in families.evicting(self.config)}

    def cache(self) -> DynamicCache:
        """An empty cache, with its slots in the pools."""
        cache = DynamicCache(config=self.config)
        adopt(cache, self.kinds, self.config)
        for index, pool in self.of.items():
            cache.layers[index].pool = pool
        return cache

    def hold(self, cache: EvictionCache) -> None:
        """Move a cache's slots into the pools that have room for them, so that its forks join other sequences of the
        pools without a copy. Slots in a file stay there; those that a fork keeps of them go to the pools."""
        for index, pool in self.of.items():
            layer = cache.layers[index]
            held = replace(layer.storage.gathered(), pool=pool)
            if not held.regions:
                held = held.moved(layer.counts)
            if held.regions:
                layer.storage, layer.pool = held, pool


def obstacle(cache: EvictionCache) -> str | None:
    """Why the rows of a cache cannot be joined with other caches' rows; None: they can."""
    for layer in cache.layers:
        if type(layer) not in (EvictionLayer, LatentLayer):
            return f"a {type(layer).__name__}, with {'a state' if states_of(layer) else 'one length for all rows'}"
    if cache.ranks.size > 1:
        return "heads on several devices"
    if cache.record_past:
        return "tokens that may be taken back (assisted decoding)"
    return None


def unlike(one: EvictionCache, other: EvictionCache) -> str | None:
    """A property in which two caches differ and which the rows of one batch must share; None: there is none."""
    if not one.owner.agrees(other.owner):
        return "model"
    mine, yours = one.sequence.policy, other.sequence.policy
    if mine is not yours and mine != yours:
        return "policy"
    pairs = [(_shared(mine), _shared(yours)) for mine, yours in zip(one.layers, other.layers, strict=True)]
    return next((name for mine, yours in pairs for name in mine if mine[name] != yours[name]), None)


def _shared(layer: EvictionLayer) -> dict[str, object]:
    """What a layer must have in common with those that it is joined with."""
    queries = layer.decode_queries
    return {
        "dtype or device": (layer.dtype, layer.device),
        "kind of stored slots": layer.kinds,
        "quantities' memory": layer.memory.keys(),
        "number of remembered queries": None if queries is None else queries.shape[1:],
    }


def go_on(caches: Items[EvictionCache]) -> bool:
    """Whether answers that attend to the slots of all tokens can continue to do so when these caches are joined: those
    slots must be in the same buffers, of the kinds of the chosen ones, and in no archive."""
    if any(obstacle(cache) for cache in caches):
        return False
    for layers in zip(*(cache.layers for cache in caches), strict=True):
        awaited = [layer.awaited for layer in layers if layer.awaited is not None]
        buffers = {id(layer.storage.prefix.k) for layer in layers if layer.storage.prefix is not None}
        if len(buffers) > 1 or len({layer.storage.kinds for layer in layers}) > 1:
            return False
        if any(layer.archive is not None for layer in layers) or not all(each.joins(awaited[0]) for each in awaited):
            return False
    return True


def join(caches: Items[EvictionCache]) -> EvictionCache:
    """Concatenate the batch rows of caches into one cache; the single caches may not be used any more. Each row keeps
    its own archive. Answers that attend to the slots of all tokens (`Policy.recall_after`) continue to do so if
    `go_on`; else they continue with the slots that their prompts chose.

    Raises ValueError for caches that cannot share a step.
    """
    first = caches[0]
    for cache in caches:
        if not cache.get_seq_length():
            raise ValueError("a cache is empty: read the prompt first")
        if reason := obstacle(cache):
            raise ValueError(f"a cache has {reason}: decode it alone")
        if differs := unlike(first, cache):
            raise ValueError(f"two caches differ in their {differs}: decode them in batches of their own")
    if any(cache.sequence.awaits for cache in caches) and not go_on(caches):
        for cache in caches:
            cache.settle()
    if any(layer.archive is not None for cache in caches for layer in cache.layers):
        for cache in caches:
            cache.sequence.run = first.sequence.run
            for layer in cache.layers:
                archive.append_last(layer)  # so that all rows' archives end at the same column
    for each in zip(*(cache.layers for cache in caches), strict=True):
        kinds = {(layer.storage.kinds, layer.archive and layer.archive.kinds) for layer in each}
        if len(kinds) > 1:  # some caches have the slots of all tokens, others chosen ones
            raise ValueError("two caches differ in their kind of stored slots: decode them in batches of their own")
    sequence = Sequence.joined([cache.sequence for cache in caches], first.layers[0].device)
    layers = [_joined(each) for each in zip(*(cache.layers for cache in caches), strict=True)]
    return first.with_layers(sequence, layers)


def part(cache: EvictionCache, rows: Items[int]) -> EvictionCache:
    """A cache with these batch rows, in which they are decoded from here on; the old cache may not decode them."""
    apart = cache.with_layers(copy.copy(cache.sequence), map(copy.copy, cache.layers))
    apart.batch_select_indices(torch.tensor(rows, dtype=torch.long))
    apart.sequence.trim()
    return apart


def _joined(layers: tuple[EvictionLayer, ...]) -> EvictionLayer:
    """Concatenate the batch rows of one layer of several caches."""
    first = layers[0]
    whole = copy.copy(first)
    whole.storage = joined([layer.storage for layer in layers])
    whole.expected = max(layer.expected for layer in layers)
    whole.budget = together([layer.budget for layer in layers])
    whole.decode_queries = together([layer.decode_queries for layer in layers])
    if any(layer.prompt is not None for layer in layers):
        whole.prompt = np.concatenate([layer.counts if layer.prompt is None else layer.prompt for layer in layers])
    starts = [0, *accumulate(len(layer.counts) for layer in layers)]
    awaited = [layer.awaited.moved(at) for layer, at in zip(layers, starts) if layer.awaited is not None]
    whole.awaited = Awaited.joined(awaited) if awaited else None
    archives = [layer.archive for layer in layers if layer.archive is not None]  # of all layers, or of none
    whole.archive = Apart.of(archives) if archives else None
    whole.memory = {name: torch.cat([layer.memory[name] for layer in layers]) for name in first.memory}
    whole.carry = None
    if any(layer.carry is not None for layer in layers):
        width = whole.longest()
        none = [torch.zeros(*layer.counts.shape, 0, device=layer.device) for layer in layers]
        each = [no if layer.carry is None else layer.carry for layer, no in zip(layers, none, strict=True)]
        whole.carry = of_layer(torch.cat([wide(x, width)[..., :width] for x in each]), whole)
    return whole
