"""Layers that keep a state beside or in place of keys and values: a convolution's last inputs, linear attention's sums.

A state takes in all tokens of a prompt, chunk by chunk. Neither the rows appended to a chunk nor left padding may enter
the state, but Transformers masks only the padding of a first call. So the module that updates the state, the mixer,
runs on the chunk with a mask, and then on the appended rows, after which the state is reset to the chunk's.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ...context import current
from ...models import families
from ..methods.propagate import cut
from ..read.step import Step
from .standin import replace, restore


def install(decoder: torch.nn.Module, kinds: Sequence[str]) -> None:
    """Replace the forwards of the decoder's mixers. kinds: each layer's kind (`families.layer_kinds`)."""
    for mixer in _mixers(decoder, kinds):
        replace(mixer, _forward)


def remove(decoder: torch.nn.Module, kinds: Sequence[str]) -> None:
    """Restore the forwards that the decoder's mixers had before `install`."""
    for mixer in _mixers(decoder, kinds):
        restore(mixer)


def _mixers(decoder: torch.nn.Module, kinds: Sequence[str]) -> Iterator[Any]:
    for layer, kind in zip(families.layers_of(decoder), kinds, strict=True):
        if kind in (families.STATE, families.FULL_ATTENTION_AND_STATE):
            mixer = families.mixer_of(layer)
            if mixer is not None:  # a layer that is only an MLP has no mixer
                yield mixer


def _forward(self: Any, run: Callable, *args: Any, **kwargs: Any) -> Any:
    """Stand in for `run`, the forward of a mixer: keep padding and appended rows out of its state."""
    step: Step | None = current()
    if step is None or not (step.appended or step.padding.any()):
        return run(*args, **kwargs)
    kwargs = _by_name(self, args, kwargs)
    rows = next(iter(kwargs.values())).shape[1]
    stop = rows - step.appended
    chunk = run(**_part(kwargs, step, 0, stop, rows)) if stop else None
    if stop == rows:
        return chunk
    layer = step.cache.layers[self.layer_idx]
    states = layer.conv_states, layer.recurrent_states
    before = [(held, {i: None if t is None else t.clone() for i, t in held.items()}) for held in states]
    appended = run(**_part(kwargs, step, stop, rows, rows))
    for held, values in before:
        held.update(values)
    if chunk is None:  # all rows are appended rows, which repeat tokens after the whole prompt was read
        return appended
    if isinstance(chunk, tuple):
        return torch.cat([chunk[0], appended[0]], 1), *chunk[1:]
    return torch.cat([chunk, appended], 1)


def _by_name(module: torch.nn.Module, args: tuple, kwargs: dict) -> dict:
    """The arguments of a call of a module's forward by name, with the hidden states first."""
    bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
    named = {name: value for name, value in bound.items() if name not in ("self", "kwargs")}
    return named | bound.get("kwargs", {})


def _part(kwargs: dict, step: Step, start: int, stop: int, rows: int) -> dict:
    """The mixer's arguments for rows start .. stop - 1 of `rows`: tensors with a value for each row are cut, and the
    mask covers the padding among these rows."""
    part = {name: cut(value, rows, lambda x: x[:, start:stop]) for name, value in kwargs.items()}
    if "attention_mask" in part:
        part["attention_mask"] = None
        if step.padding.any() and start == 0:
            step = step.on(next(iter(kwargs.values())).device)
            column = torch.arange(start, stop, device=step.first.device)
            part["attention_mask"] = (column >= step.first[:, None]).long()
    return part
