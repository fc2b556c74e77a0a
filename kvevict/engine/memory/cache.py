"""`EvictionCache`, which a `DynamicCache` becomes when a patched model fills it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ...models import families
from ...models.owner import Owner, form
from .latent import LatentLayer
from .layer import EvictionLayer
from .meter import Meter
from .ranks import ALONE, Ranks
from .sequence import Sequence
from .stateful import SlidingLayer, StatefulLayer, select_states
from .storage import ROOM, Storage
from .table import Table
from .tiers import Tiers


class EvictionCache(DynamicCache):
    """A `DynamicCache` that a patched model has filled; `adopt` changes the class of the caller's object."""

    layers: list[Any]  # each an EvictionLayer or a layer of Transformers
    sequence: Sequence  # counts of the tokens that the cache has read
    tiers: Tiers  # the slots of all tokens read, for recall
    record_past = False  # whether assisted decoding is on, which removes rejected tokens
    meter: Meter | None = None  # measurements of the last read
    owner = Owner(None)  # the model and the state of its weights that computed the slots
    ranks = ALONE  # the ranks that share the layers' heads; `save_cache` needs them
    plain: type = DynamicCache  # the object's class before `adopt`

    def fork(self) -> EvictionCache:
        """Return a copy-on-write fork of this cache, for instance one for each of many questions about one text.

        A fork shares the stored slots and appends slots of its own. It copies the shared slots only in order to evict
        from them, to decode with a policy that evicts, to decode over latents, or to be saved. States are copied at
        once. A change of the fork never affects this cache, and a change of this cache never affects the fork. A fork
        can be forked again, can decode in another thread, and can outlive this cache.
        """
        return self.with_storages({})

    def with_storages(self, storages: Mapping[int, Storage]) -> EvictionCache:
        """Fork this cache, with other slots in some layers. storages: layer -> its slots; of such a layer's tokens the
        fork has no other slots, and no answer attends to the slots of all tokens."""
        layers = [_forked(layer, storages.get(index)) for index, layer in enumerate(self.layers)]
        twin = self.with_layers(copy.copy(self.sequence), layers)
        tiers = twin.tiers
        tiers.every = {index: every.forked() for index, every in tiers.every.items() if index not in storages}
        if storages:
            tiers.answers = []
        twin.meter = self.meter
        return twin

    def recalled(self) -> EvictionCache:
        """Fork this cache, with the slots of all tokens in every layer; if only the kept slots are known, return this
        cache itself."""
        whole = {index: self.tiers.whole(index) for index in self.tiers.every}
        return self.with_storages(whole) if whole else self

    def first(self, tokens: int) -> EvictionCache:
        """Fork the first `tokens` tokens of this cache, which must have one batch row. Every layer must hold the slots
        of all tokens (as `recalled` returns them), and no layer may have a sliding window or a state."""
        count = self.sequence.columns - tokens
        own = self.tiers.layers.items()
        twin = self.with_storages({index: layer.fork().storage.crop(count) for index, layer in own})
        if count:
            twin.sequence.crop(count)
            twin.sequence.floor = tokens
        return twin

    def with_layers(self, sequence: Sequence, layers: Iterable[CacheLayerMixin]) -> EvictionCache:
        """Copy this cache, without its meter, with other layers, whose tokens `sequence` counts."""
        twin = copy.copy(self)  # `__reduce__` leaves the meter out
        twin.sequence, twin.layers = sequence, list(layers)
        own = _evicting(twin.layers)
        for layer in own.values():
            layer.sequence = sequence
        twin.tiers = self.tiers.on(sequence, own)
        return twin

    def tick(self, layers: Items[EvictionLayer], room: int = ROOM) -> None:
        """Count one more slot in every head of the layers, for the token to be decoded next. room: free rows per head
        in buffers that have to grow."""
        table = self.__dict__.setdefault("table", Table())
        if not table.holds([layer.storage for layer in layers]):
            ready = [layer for layer in layers if layer.is_represented]  # hook/attention.py counts for the other layers
            for layer in ready:
                layer.make_room(room)
            table.take([layer.storage for layer in ready])
        table.tick()

    def check_owner(self, decoder: torch.nn.Module, kinds: Items[str], thorough: bool = True) -> None:
        """Raise ValueError if another model than `decoder` filled the cache, or `decoder` filled it before it was cast,
        moved or changed.

        thorough   False, before a decoded token or candidates: of the weights, check only adapters (`Owner.difference`)
        """
        if self.owner.form not in (None, now := form(decoder)):
            before, after = ("{} on {}".format(*each).removeprefix("torch.") for each in (self.owner.form, now))
            raise ValueError(
                f"past_key_values was filled by weights in {before}, this model's are in {after}: cast and move a "
                "model before it reads, or read the prompt again"
            )
        is_other = self.owner.model() is not decoder
        if is_other:
            _check_depth(self.layers, kinds, exact=True)
        if not self.get_seq_length():
            return
        if (differs := self.owner.difference(decoder, thorough)) is not None:
            raise ValueError(
                f"past_key_values was filled by another model{differs}: give the one that read it, with the same PEFT "
                "adapters on, or read the prompt again"
            )
        if is_other:
            self.owner = Owner(decoder, self.owner.known)

    def activate_past_recording(self) -> None:
        super().activate_past_recording()
        self.record_past = True

    def reset(self) -> None:
        super().reset()
        self.sequence.__init__()
        self.tiers = Tiers(self.sequence, self.tiers.layers)
        for name in ("record_past", "meter", "owner"):
            self.__dict__.pop(name, None)  # back to the class's defaults

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last -tokens_to_remove tokens, which must have been read since the last eviction. If a layer
        cannot remove them, raise an error and change no layer."""
        count = self.sequence.count_to_remove(tokens_to_remove)
        layers = [  # enough for an undo: a layer's crop changes attributes and dicts of states, and writes to no tensor
            {name: dict(value) if type(value) is dict else value for name, value in layer.__dict__.items()}
            for layer in self.layers
        ]
        self.sequence.removing = count
        try:
            super().crop(tokens_to_remove)
            self.tiers.crop(count)
        except BaseException:
            for layer, attributes in zip(self.layers, layers, strict=True):
                layer.__dict__.clear()
                layer.__dict__.update(attributes)
            raise
        finally:
            self.sequence.removing = None
        if count:
            self.sequence.crop(count)
            if self.meter is not None:
                self.meter.stored = [layer.counts for layer in self.tiers.layers.values()]

    def batch_select_indices(self, indices: torch.Tensor | Items[int]) -> None:
        """Keep the batch rows `indices`: a boolean mask, or row numbers in any order, which may repeat."""
        if self.sequence.seen is None:
            return
        every = torch.arange(len(self.sequence.seen))
        rows = every[torch.as_tensor(indices).cpu()].tolist()
        if rows == every.tolist():
            return
        for layer in self.layers:
            if isinstance(layer, EvictionLayer):
                layer.select(rows)
            elif hasattr(layer, "batch_select_indices"):
                layer.batch_select_indices(torch.tensor(rows))
            else:
                select_states(layer, rows)
        self.tiers.select(rows)
        self.sequence.select(rows)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.sequence.seen is not None:
            self.batch_select_indices(torch.arange(len(self.sequence.seen)).repeat_interleave(repeats))

    def __reduce__(self) -> tuple:
        kept = {name: value for name, value in self.__dict__.items() if name not in ("meter", "table", "replay")}
        return _blank, (self.plain,), kept


def _kind(plain: type[DynamicCache]) -> type[EvictionCache]:
    """Return a subclass of `EvictionCache` and of `plain`, so that a user's cache class keeps its methods."""
    if plain is DynamicCache:
        return EvictionCache
    return type(plain.__name__, (EvictionCache, plain), dict(plain=plain))


def _blank(plain: type[DynamicCache]) -> EvictionCache:
    return object.__new__(_kind(plain))


def _evicting(layers: list) -> dict[int, EvictionLayer]:
    """Return {index: layer} for the layers that slots are evicted from."""
    return {index: layer for index, layer in enumerate(layers) if isinstance(layer, EvictionLayer)}


def _forked(layer: CacheLayerMixin, storage: Storage | None) -> CacheLayerMixin:
    if isinstance(layer, EvictionLayer):
        return layer.fork(storage)
    return copy.deepcopy(layer) if hasattr(layer, "conv_states") else copy.copy(layer)  # states are updated in place


def adopt(cache: Any, kinds: Items[str], config: Any, ranks: Ranks = ALONE, first: torch.Tensor | None = None) -> None:
    """Make a `DynamicCache` an `EvictionCache` in place, so that the caller's reference stays valid.

    kinds   what each of the model's layers stores (slots, a window, a state): `families.layer_kinds(config)`
    first   [B] number of columns of left padding in a cache that the unpatched model has filled; None: 0

    Raises ValueError, and leaves the cache as it was, for layers that cannot be evicted from.
    """
    layers = list(cache.layers)
    _check_depth(layers, kinds)
    if len(layers) < len(kinds):  # a cache built without a config grows its layers lazily
        layers += DynamicCache(config=config).layers[len(layers) :]
    for index, (kind, layer) in enumerate(zip(kinds, layers, strict=True)):
        if kind == families.SLIDING and not isinstance(layer, DynamicSlidingWindowLayer):
            raise ValueError(
                f"past_key_values has a {type(layer).__name__} at sliding-window layer {index}; build it with "
                "DynamicCache(config=model.config)"
            )
        if kind in families.EVICTS and not isinstance(layer, EvictionLayer):
            _check_import(layer)
    cache.layers = layers
    sequence, columns = cache.__dict__.setdefault("sequence", Sequence()), cache.get_seq_length()
    for index, (kind, layer) in enumerate(zip(kinds, layers, strict=True)):  # may be repeated after an error
        if kind == families.SLIDING and not isinstance(layer, SlidingLayer):
            layers[index] = copy.copy(layer)
            layers[index].__class__ = SlidingLayer
        elif kind in families.EVICTS and not isinstance(layer, EvictionLayer):
            layers[index] = _imported(layer, sequence, families.is_latent(config), first)
            layer.keys = layer.values = None
    cache.__dict__.setdefault("tiers", Tiers(sequence, {})).layers.update(_evicting(layers))
    if columns > sequence.columns:
        sequence.coming = columns, columns - (0 if first is None else np.array(first.tolist()))
        sequence.advance()
    cache.layer_class_to_replicate = None
    cache.ranks = ranks
    if not isinstance(cache, EvictionCache):
        cache.__class__ = _kind(type(cache))


def _check_depth(layers: list, kinds: Items[str], exact: bool = False) -> None:
    """Raise ValueError if a cache has more layers than the model, or, if `exact`, fewer."""
    if len(layers) > len(kinds) or (exact and len(layers) < len(kinds)):
        raise ValueError(
            f"past_key_values has {len(layers)} layers, the model {len(kinds)}: it is another model's cache"
        )


def _imported(layer: Any, sequence: Sequence, latent: bool, first: torch.Tensor | None) -> EvictionLayer:
    """Make an `EvictionLayer` that has the slots of a layer of Transformers. latent: the slots are latents (MLA)."""
    plain = LatentLayer if latent else EvictionLayer
    ours = StatefulLayer(sequence, layer) if _has_both(layer) else plain(sequence)
    if getattr(layer, "keys", None) is not None and layer.get_seq_length() > 0:
        k, v = ours.pack(layer.keys, layer.values)
        batch, _, columns, _ = k.shape
        first = torch.zeros(batch, dtype=torch.int32, device=k.device) if first is None else first
        first, padding = first.to(k.device), np.array(first.tolist())
        ours.lazy_initialization(k)
        pos = (torch.arange(columns, device=k.device) - first[:, None]).to(torch.int32)
        ours.append(k, v, pos, first, padding)
    return ours


def _has_both(layer: object) -> bool:
    """Whether a layer has both keys and values and a state (of a convolution or a recurrence)."""
    return isinstance(layer, DynamicLayer) and hasattr(layer, "update_conv_state")


def _check_import(layer: object) -> None:
    """Raise ValueError if `_imported` cannot take over a layer's slots."""
    wide = type(layer) is DynamicSlidingWindowLayer and layer.get_seq_length() < layer.sliding_window
    if not (type(layer) is DynamicLayer or _has_both(layer) or wide):
        raise ValueError(
            f"past_key_values has a {type(layer).__name__}; kvevict evicts from a plain DynamicCache only (no static, "
            "quantised or offloaded cache): drop cache_implementation, or call kvevict.unpatch(model)"
        )
