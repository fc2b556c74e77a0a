"""Join the caches of several sequences into one, to decode them together, and part them again. Slots that lie in a pool
are not moved."""

import copy
from collections.abc import Sequence as Items
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from ...models import families
from .cache import EvictionCache, adopt
from .carried import of_layer, wide
from .latent import LatentLayer
from .layer import EvictionLayer
from .pool import SlotPool
from .rows import joined, together
from .sequence import Sequence
from .stateful import states_of
from .tiers import Tiers


class Pools:
    """One pool of slots for each layer of a decoder that evicts. rows: number of slots in a pool, over all kv heads."""

    def __init__(self, decoder: Any, rows: int) -> None:
        self.config, self.kinds = decoder.config, families.layer_kinds(decoder.config)
        self.of = {index: SlotPool(rows) for index in families.evicting(self.config)}

    def cache(self) -> DynamicCache:
        """Create an empty cache that will store its slots in the pools."""
        cache = DynamicCache(config=self.config)
        adopt(cache, self.kinds, self.config)
        for index, pool in self.of.items():
            cache.layers[index].pool = pool
        return cache

    def hold(self, cache: EvictionCache) -> None:
        """Move each layer's slots into its pool, if the pool has room, so that forks of the cache can be joined with
        other sequences of the pools without a copy. Slots in a file stay in the file until a fork evicts; the slots
        that the fork keeps go to the pools."""
        for index, pool in self.of.items():
            layer = cache.layers[index]
            held = replace(layer.storage.gathered(), pool=pool)
            if not held.regions:
                held = held.moved(layer.counts)
            if held.regions:
                layer.hold(held, layer.head_offsets)
                layer.pool = pool


def obstacle(cache: EvictionCache) -> str | None:
    """Return what prevents the batch rows of a cache from being joined with those of other caches; None if nothing."""
    for layer in cache.layers:
        if type(layer) not in (EvictionLayer, LatentLayer):
            return f"a {type(layer).__name__}, with {'a state' if states_of(layer) else 'one length for all rows'}"
    if cache.ranks.size > 1:
        return "heads on several devices"
    if cache.record_past:
        return "tokens that may be taken back (assisted decoding)"
    return None


def unlike(one: EvictionCache, other: EvictionCache) -> str | None:
    """Return a property in which two caches differ although the rows of one batch must share it; None if there is no
    such property."""
    if not one.owner.agrees(other.owner):
        return "model"
    mine, yours = one.sequence.policy, other.sequence.policy
    if mine is not yours and mine != yours:
        return "policy"
    pairs = [(_shared(mine), _shared(yours)) for mine, yours in zip(one.layers, other.layers, strict=True)]
    return next((name for mine, yours in pairs for name in mine if mine[name] != yours[name]), None)


def _shared(layer: EvictionLayer) -> dict[str, object]:
    """Return {name: property} of a layer; layers can be joined only if these properties are equal."""
    queries = layer.decode_queries
    return {
        "dtype or device": (layer.dtype, layer.device),
        "kind of stored slots": layer.kinds,
        "quantities' memory": layer.memory.keys(),
        "number of remembered queries": None if queries is None else queries.shape[1:],
    }


def go_on(caches: Items[EvictionCache]) -> bool:
    """Whether answers that attend to the slots of all tokens can continue to do so after these caches are joined. For
    that, the caches must share each layer's prefix, must pack slots in the same way, and may have no other slots."""
    answers = [each for cache in caches for each in cache.tiers.answers if each is not None]
    if any(obstacle(cache) or cache.tiers.every for cache in caches) or not all(map(answers[0].joins, answers)):
        return False
    layers = zip(*(cache.layers for cache in caches), strict=True)
    return one_prefix(caches) and all(len({layer.storage.kinds for layer in each}) == 1 for each in layers)


def one_prefix(caches: Items[EvictionCache]) -> bool:
    """Whether the prefixes of the caches' layers, if any, lie in the same buffers, so that `join` copies none."""
    for layers in zip(*(cache.tiers.layers.values() for cache in caches), strict=True):
        prefixes = [layer.storage.prefix for layer in layers]
        if len({id(prefix.k) for prefix in prefixes if prefix is not None}) > 1:
            return False
    return True


def join(caches: Items[EvictionCache]) -> EvictionCache:
    """Concatenate the batch rows of caches into one cache, which replaces the given caches. Each row keeps the slots of
    all its tokens. An answer that attends to these (`Policy.recall_after`) still does so after the join if `go_on`
    returns True for the caches; otherwise it goes on with the slots kept at its prompt's end.

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
    if any(cache.tiers.awaits for cache in caches) and not go_on(caches):
        for cache in caches:
            cache.tiers.settle()
    if any(cache.tiers.every for cache in caches):
        for cache in caches:
            cache.sequence.run = first.sequence.run
            cache.tiers.append_last()  # so that the slots of all batch rows end at the same column
    for index in first.tiers.layers:
        every = [cache.tiers.every.get(index) for cache in caches]
        kinds = {(cache.layers[index].storage.kinds, own and own.kinds) for cache, own in zip(caches, every)}
        if len(kinds) > 1:  # some caches hold the slots of all tokens, others hold kept slots that are packed otherwise
            raise ValueError("two caches differ in their kind of stored slots: decode them in batches of their own")
    sequence = Sequence.joined([cache.sequence for cache in caches], first.layers[0].device)
    layers = [_joined(each) for each in zip(*(cache.layers for cache in caches), strict=True)]
    whole = first.with_layers(sequence, layers)
    whole.tiers = Tiers.joined([cache.tiers for cache in caches], sequence, whole.tiers.layers)
    return whole


def part(cache: EvictionCache, rows: Items[int]) -> EvictionCache:
    """Return a cache of the batch rows `rows`, to decode them from now on; the old cache may not decode them any
    more."""
    apart = cache.with_layers(copy.copy(cache.sequence), map(copy.copy, cache.layers))
    apart.batch_select_indices(torch.tensor(rows, dtype=torch.long))
    apart.tiers.columns -= apart.sequence.trim()
    return apart


def _joined(layers: tuple[EvictionLayer, ...]) -> EvictionLayer:
    """Concatenate the batch rows of one layer of several caches."""
    first = layers[0]
    whole = copy.copy(first)
    whole.hold(joined([layer.storage for layer in layers]))
    whole.expected = max(layer.expected for layer in layers)
    whole.budget = together([layer.budget for layer in layers])
    whole.decode_queries = together([layer.decode_queries for layer in layers])
    if any(layer.prompt is not None for layer in layers):
        whole.prompt = np.concatenate([layer.counts if layer.prompt is None else layer.prompt for layer in layers])
    whole.memory = {name: torch.cat([layer.memory[name] for layer in layers]) for name in first.memory}
    whole.carry = None
    if any(layer.carry is not None for layer in layers):
        width = whole.longest()
        none = [torch.zeros(*layer.counts.shape, 0, device=layer.device) for layer in layers]
        each = [no if layer.carry is None else layer.carry for layer, no in zip(layers, none, strict=True)]
        whole.carry = of_layer(torch.cat([wide(x, width)[..., :width] for x in each]), whole)
    return whole
