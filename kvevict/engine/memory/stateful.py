"""Layers that have a state as well as slots, or a sliding window in place of slots."""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from ...context import current
from ...models import compat
from .layer import EvictionLayer
from .sequence import Sequence
from .storage import Storage


def states_of(layer: object) -> list[Tensor]:
    """Return the convolution and recurrent states of a layer; an empty list if the layer has none."""
    held = getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})
    return [t for states in held for t in states.values() if t is not None]


def select_states(layer: object, rows: list[int]) -> None:
    """Keep the batch rows `rows` of a layer's states, in new tensors and dicts, since a copy of the layer may share the
    old ones."""
    for name in ("conv_states", "recurrent_states"):
        states = getattr(layer, name)
        setattr(layer, name, {index: None if t is None else t[rows] for index, t in states.items()})


def tensors_of(layer: object) -> list[Tensor]:
    """Return all tensors of a cache layer: its states; its slots with their carried scores and remembered queries; or,
    for a sliding-window layer, its keys and values."""
    if isinstance(layer, EvictionLayer):
        own = [*layer.storage.tensors(), layer.carry, layer.decode_queries, *layer.memory.values()]
    else:
        own = [getattr(layer, "keys", None), getattr(layer, "values", None)]
    return [*states_of(layer), *(t for t in own if t is not None)]


class StatefulLayer(EvictionLayer):
    """A layer with slots and states. Transformers' own layer, `state`, holds the states and provides all attributes
    that this class lacks."""

    def __init__(self, sequence: Sequence, state: Any = None) -> None:
        super().__init__(sequence)
        self.state = state

    def __getattr__(self, name: str) -> Any:
        if name == "state":  # `state` is not set yet, as while this object is being copied
            raise AttributeError(name)
        return getattr(self.state, name)

    def fork(self, storage: Storage | None = None) -> EvictionLayer:
        twin: Any = super().fork(storage)
        twin.state = copy.deepcopy(self.state)  # states are updated in place
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

    def select(self, rows: list[int]) -> None:
        super().select(rows)
        self.state = copy.copy(self.state)
        select_states(self.state, rows)


compat.keeps_state(StatefulLayer)


class SlidingLayer(DynamicSlidingWindowLayer):
    """Transformers' sliding-window layer. Rows appended to a chunk attend to the window but are not stored in it."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
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
