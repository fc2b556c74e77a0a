"""Hooks that note the input of a layer's attention block if a quantity of the policy needs it."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ... import families
from ...context import current


def install(decoder: torch.nn.Module, order: Iterable[int]) -> list[RemovableHandle]:
    """Hooks that put the input into `Step.hidden`; the layer's call takes it from there."""
    layers = families.layers_of(decoder)
    modules = [families.attention_of(layers[index], index) for index in order]
    return [module.register_forward_pre_hook(_note, with_kwargs=True) for module in modules]


def _note(module: Any, args: Any, kwargs: Any = None) -> None:
    step = current()
    if step is not None and step.plan.wants_hidden:
        step.hidden[module.layer_idx] = args[0] if args else kwargs["hidden_states"]
