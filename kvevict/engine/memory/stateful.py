"""Layers with a state beside their slots, or a sliding window in place of them."""

import copy
from typing import Any

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer

from ...context import current
from ...models import compat
from .layer import EvictionLayer


def states_of(layer: Any) -> list[torch.Tensor]:
    """The states of a layer, convolution's and recurrent; an empty list for a layer without any."""
    held = getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})
    return [t for states in held for t in states.values() if t is not None]


def select_states(layer: Any, indices: Any) -> None:
    """Keep the batch rows `indices` of the states of Transformers' layer, in tensors and dicts of its own: a copy of
    the layer goes on with all rows."""
    for name in ("conv_states", "recurrent_states"):
        states = getattr(layer, name)
        setattr(layer, name, {index: None if t is None else t[indices] for index, t in states.items()})


def archived(layer: EvictionLayer) -> tuple[torch.Tensor, ...]:
    """All tensors of a layer's archive."""
    return () if layer.archive is None else layer.archive.tensors()


def tensors_of(layer: Any) -> list[torch.Tensor]:
    """All tensors of a cache's layer: states, a window's keys and values, slots and what belongs to them."""
    if isinstance(layer, EvictionLayer):
        chosen = () if layer.awaited is None else layer.awaited.tensors()
        own = *layer.storage.tensors(), *archived(layer), *chosen, layer.carry, layer.decode_queries
        own = *own, *layer.memory.values()
    else:
        own = (getattr(layer, "keys", None), getattr(layer, "values", None))
    return [*states_of(layer), *(t for t in own if t is not None)]


class StatefulLayer(EvictionLayer):
    """Our slots in a layer that also has a convolution's or a recurrent state. Transformers' layer `state` holds that
    state, and answers for every attribute that is not ours."""

    def __init__(self, sequence: Any, state: Any = None) -> None:
        super().__init__(sequence)
        self.state = state

    def __getattr__(self, name: str) -> Any:
        if name == "state":  # not set yet, as while copying
            raise AttributeError(name)
        return getattr(self.state, name)

    def fork(self, storage: Any = None) -> EvictionLayer:
        twin: Any = super().fork(storage)
        twin.state = copy.deepcopy(self.state)  # it is updated in place
        return twin

    def reset(self) -> None:
        super().reset()
        if self.__dict__.get("state") is not None:
            self.state.reset()

    def drop_last(self, count: int) -> None:
        raise ValueError(
            "crop cannot remove tokens from a layer that has a state beside its slots; read the prompt again, or "
            "continue a fork of the cache"
        )

    def select(self, chosen: list[int]) -> None:
        super().select(chosen)
        self.state = copy.copy(self.state)
        select_states(self.state, chosen)


compat.keeps_state(StatefulLayer)


class SlidingLayer(DynamicSlidingWindowLayer):
    """Transformers' sliding window. Rows that are appended to a chunk read it and do not enter it."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        step = current()
        appended = 0 if step is None else step.appended
        if not appended:
            return super().update(key_states, value_states, *args, **kwargs)
        before: Any = self.keys, self.values
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
