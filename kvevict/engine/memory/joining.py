"""Caches of several sequences that decode together: made in pools, joined to one cache, and parted again. Joining and
parting move no slot of a pool."""

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
from .pool import Pool
from .sequence import Sequence
from .stateful import states_of
from .storage import Storage, together


class Pools:
    """A pool for each layer of a decoder that evicts, of `rows` slots over all heads."""

    def __init__(self, decoder: Any, rows: int) -> None:
        self.config, self.kinds = decoder.config, families.layer_kinds(decoder.config)
        self.of = {index: Pool(rows) for index in families.evicting(self.config)}

    def cache(self) -> DynamicCache:
        """An empty cache, with its slots in the pools."""
        cache = DynamicCache(config=self.config)
        adopt(cache, self.kinds, self.config)
        for index, pool in self.of.items():
            cache.layers[index].pool = pool
        return cache

    def hold(self, cache: Any) -> None:
        """Move a cache's slots into the pools, in layers where these have room: its forks then join beside other
        sequences of the pools without a copy of these slots. Slots in a file stay there; those that a fork keeps of
        them go to the pools."""
        for index, pool in self.of.items():
            layer = cache.layers[index]
            held = replace(layer.storage.gathered(), pool=pool)
            if not held.regions:
                held = held.moved(layer.counts)
            if held.regions:
                layer.storage, layer.pool = held, pool

    def left(self) -> int:
        """Free rows of the fullest pool."""
        return min(pool.left() for pool in self.of.values())


def obstacle(cache: EvictionCache) -> str | None:
    """Why the rows of a cache cannot decode beside those of other caches; None: they can."""
    for layer in cache.layers:
        if type(layer) not in (EvictionLayer, LatentLayer):
            return f"a {type(layer).__name__}, with {'a state' if states_of(layer) else 'one length for all rows'}"
    if cache.ranks.size > 1:
        return "heads on several devices"
    if cache.record_past:
        return "tokens that may be taken back (assisted decoding)"
    return None


def unlike(one: EvictionCache, other: EvictionCache) -> str | None:
    """The property in which two caches differ that rows of one batch must share; None: none."""
    if not one.owner.agrees(other.owner):
        return "model"
    mine, yours = one.sequence.policy, other.sequence.policy
    if mine is not yours and mine != yours:
        return "policy"
    for mine, yours in zip(one.layers, other.layers, strict=True):
        if (mine.dtype, mine.device) != (yours.dtype, yours.device):
            return "dtype or device"
        if mine.kinds != yours.kinds:
            return "kind of stored slots"
        if mine.memory.keys() != yours.memory.keys():
            return "quantities' memory"
        rows = [None if each is None else each.shape[1:] for each in (mine.decode_queries, yours.decode_queries)]
        if rows[0] != rows[1]:
            return "number of remembered queries"
    return None


def go_on(caches: Items[EvictionCache]) -> bool:
    """Whether answers that attend to the slots of all tokens go on so where these caches join: these slots lie in the
    same buffers, as those that are chosen are stored, and are in no archive."""
    if any(obstacle(cache) for cache in caches):
        return False
    for layers in zip(*(cache.layers for cache in caches), strict=True):
        awaited = [layer.awaited for layer in layers if layer.awaited is not None]
        if any(layer.archive is not None for layer in layers) or not all(each.joins(awaited[0]) for each in awaited):
            return False
        if len({id(layer.storage.prefix.k) for layer in layers if layer.storage.prefix is not None}) > 1:
            return False
        if len({layer.storage.kinds for layer in layers}) > 1:
            return False
    return True


def join(caches: Items[EvictionCache]) -> EvictionCache:
    """Concatenate the batch rows of caches in one, and go on with that: the single caches may not be used any more.
    Each row keeps a separate archive. Answers that still attend to all slots (`Policy.recall_after`) go on so if
    `go_on` says it; else they have those that their prompts chose.

    Raises ValueError for caches that cannot share a step.
    """
    first = caches[0]
    for cache in caches:
        if not cache.get_seq_length():
            raise ValueError("a cache is empty: read the prompt first")
        reason = obstacle(cache)
        if reason is not None:
            raise ValueError(f"a cache has {reason}: decode it alone")
        differs = unlike(first, cache)
        if differs is not None:
            raise ValueError(f"two caches differ in their {differs}: decode them in batches of their own")
    if any(cache.sequence.awaits for cache in caches) and not go_on(caches):
        for cache in caches:
            cache.settle()
    if any(layer.archive is not None for cache in caches for layer in cache.layers):
        for cache in caches:
            for layer, like in zip(cache.layers, first.layers, strict=True):
                layer.archive_place = like.archive_place
                archive.append_last(layer)  # the rows' archives lack as many columns from here on: none
    for each in zip(*(cache.layers for cache in caches), strict=True):
        kinds = {(layer.storage.kinds, layer.archive and layer.archive.kinds) for layer in each}
        if len(kinds) > 1:  # slots of all tokens beside chosen ones
            raise ValueError("two caches differ in their kind of stored slots: decode them in batches of their own")
    device: Any = first.layers[0].device  # of our layers, by `obstacle`
    sequence = Sequence.joined([cache.sequence for cache in caches], device)
    layers = [_joined(each) for each in zip(*(cache.layers for cache in caches), strict=True)]
    return first.with_layers(sequence, layers)


def part(cache: EvictionCache, rows: Items[int]) -> EvictionCache:
    """A cache with the batch rows of these numbers. They go on in it, and may not be decoded in the old one."""
    apart = cache.with_layers(copy.copy(cache.sequence), map(copy.copy, cache.layers))
    apart.batch_select_indices(torch.tensor(rows, dtype=torch.long))
    apart.sequence.trim()
    return apart


def _joined(layers: tuple) -> EvictionLayer:
    """Concatenate the rows of one layer of several caches."""
    first = layers[0]
    whole = copy.copy(first)
    whole.storage = Storage.joined([layer.storage for layer in layers])
    whole.expected = max(layer.expected for layer in layers)
    whole.budget = together([layer.budget for layer in layers])
    whole.decode_queries = together([layer.decode_queries for layer in layers])
    if any(layer.prompt is not None for layer in layers):
        prompts = [layer.counts if layer.prompt is None else layer.prompt for layer in layers]
        whole.prompt = np.concatenate(prompts)
    starts = [0, *accumulate(len(layer.counts) for layer in layers)]
    awaited = [layer.awaited.moved(at) for layer, at in zip(layers, starts) if layer.awaited is not None]
    whole.awaited = Awaited.joined(awaited) if awaited else None
    if first.archive is not None:
        whole.archive = archive.apart([layer.archive for layer in layers])
    whole.memory = {name: torch.cat([layer.memory[name] for layer in layers]) for name in first.memory}
    whole.carry = None
    if any(layer.carry is not None for layer in layers):
        width = whole.longest()
        none = [torch.zeros(*layer.counts.shape, 0, device=layer.device) for layer in layers]
        each = [no if layer.carry is None else layer.carry for layer, no in zip(layers, none, strict=True)]
        whole.carry = of_layer(torch.cat([wide(x, width)[..., :width] for x in each]), whole)
    return whole
