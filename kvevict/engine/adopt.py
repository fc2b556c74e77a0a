"""Layers of a `DynamicCache` that a patched model fills: ours in place of those that are evicted from, and what the
others need so that rows which read along never enter them."""

import copy

import numpy as np
import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from .. import compat, families
from .cache import EvictionLayer
from .context import context
from .latent import LatentLayer


class StatefulLayer(EvictionLayer):
    """Our slots, in a layer that has a convolution's or a recurrent state besides: `state` is Transformers' layer that
    holds it, and answers for all that is not ours."""

    def __init__(self, state=None):
        super().__init__()
        self.state = state

    def __getattr__(self, name):
        if name == "state":  # before it is there, as while copying
            raise AttributeError(name)
        return getattr(self.state, name)

    def fork(self):
        return copy.deepcopy(self)

    def reset(self):
        super().reset()
        if self.__dict__.get("state") is not None:
            self.state.reset()

    def batch_select_indices(self, indices):
        super().batch_select_indices(indices)
        for states in (self.state.conv_states, self.state.recurrent_states):
            states |= {index: t[indices] for index, t in states.items() if t is not None}


compat.keeps_state(StatefulLayer)


class SlidingLayer(DynamicSlidingWindowLayer):
    """Transformers' sliding window, which a chunk's transient rows (the probe) read but do not enter."""

    def update(self, key_states, value_states, *args, **kwargs):
        step, tap = context().step, context().tap
        if tap is not None:
            tap.slid(key_states, value_states)
        appended = 0 if step is None else step.appended
        if not appended:
            return super().update(key_states, value_states, *args, **kwargs)
        before = self.keys, self.values
        full = super().update(key_states, value_states, *args, **kwargs)
        stored = key_states.shape[2] - appended
        self.cumulative_length -= appended
        if before[0] is None:
            before = key_states[:, :, :0], value_states[:, :, :0]
        window = 0 if getattr(self, "record_past", False) else -self.sliding_window + 1
        self.keys, self.values = (
            torch.cat([old, new[:, :, :stored]], dim=2)[:, :, window:]
            for old, new in zip(before, (key_states, value_states), strict=True)
        )
        return full


class EvictionCache(DynamicCache):
    """What a patched model makes of a plain `DynamicCache`."""

    def fork(self):
        """A cache that goes on from here by itself: one context, many questions, each with a fork of its own.

        What is stored is shared, not copied: a fork adds a tail of its own, and copies what it shares only when it must
        (to evict again, to crop, to reorder beams, to be saved). Latents and states are copied at once. Neither side
        ever changes what the other sees. A fork can be forked, decoded in another thread, and outlives the cache it
        came from.
        """
        twin = copy.copy(self)
        twin.layers = [_forked(layer) for layer in self.layers]
        return twin


def _forked(layer):
    if isinstance(layer, EvictionLayer):
        return layer.fork()
    return copy.deepcopy(layer) if hasattr(layer, "conv_states") else copy.copy(layer)  # a state is updated in place


def adopt(cache, kinds, config, first=None) -> None:
    """Replace, in place, the layers of a `DynamicCache` that we evict from, so that the caller's reference stays right.

    kinds   per layer, as `families.layer_kinds(config)`
    first   [B] left padding of the tokens that a plain cache holds already (a prefix read before patching)
    """
    layers = list(cache.layers)
    if len(layers) > len(kinds):
        raise ValueError(
            f"past_key_values has {len(layers)} layers, the model {len(kinds)}: it is another model's cache"
        )
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
    for index, (kind, layer) in enumerate(zip(kinds, layers, strict=True)):  # each whole: an error leaves a right cache
        if kind == families.SLIDING:
            layer.__class__ = SlidingLayer
        elif kind in families.EVICTS and not isinstance(layer, EvictionLayer):
            layers[index] = import_layer(layer, families.is_latent(config), first)
            layer.keys = layer.values = None
    cache.layer_class_to_replicate = None
    if type(cache) is DynamicCache:
        cache.__class__ = EvictionCache


def import_layer(layer, latent, first=None):
    """An `EvictionLayer` with the tokens that a plain `DynamicLayer` holds; latent: it holds latents."""
    ours = StatefulLayer(layer) if _has_both(layer) else LatentLayer() if latent else EvictionLayer()
    if getattr(layer, "keys", None) is not None and layer.get_seq_length() > 0:
        k, v = ours.pack(layer.keys, layer.values)
        batch, _, columns, _ = k.shape
        first = torch.zeros(batch, dtype=torch.int32, device=k.device) if first is None else first
        first, padding = first.to(k.device), np.array(first.tolist())
        ours.lazy_initialization(k)
        pos = (torch.arange(columns, device=k.device) - first[:, None]).to(torch.int32)
        ours.append(k, v, pos, first, padding)
        ours.advance(columns, columns - padding)
    return ours


def _has_both(layer) -> bool:
    return isinstance(layer, DynamicLayer) and hasattr(layer, "update_conv_state")


def _check_import(layer) -> None:
    wide = type(layer) is DynamicSlidingWindowLayer and layer.get_seq_length() < layer.sliding_window
    if not (type(layer) is DynamicLayer or _has_both(layer) or wide):
        raise ValueError(
            f"past_key_values has a {type(layer).__name__}; kvevict evicts from a plain DynamicCache only (no static, "
            "quantised or offloaded cache): drop cache_implementation, or call kvevict.unpatch(model)"
        )
