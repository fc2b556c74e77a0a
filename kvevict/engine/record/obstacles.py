"""The reasons not to record decoded tokens, or not to replay a recording, each with its test. docs/usage.md lists the
reasons. replay.py finds further reasons by comparing two tokens."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules import module as of_all
from torch.utils.hooks import RemovableHandle

from ... import cautions
from ...models import rotary
from ...ops.few_rows import is_watched
from ..memory.layer import EvictionLayer
from ..read.step import OF_EVERY_TOKEN, Step
from .calls import RECORDERS

Inputs = dict[str, Any]  # argument's name -> value, for the decoder's forward
Test = Callable[[Step, Inputs], bool]  # whether a reason holds for a decoded token
# Python modules that define hooks which do nothing during a decoded token
HARMLESS = "kvevict.", "transformers.utils.output_capturing"


def _has_other_layers(step: Step, inputs: Inputs) -> bool:
    return any(type(layer) is not EvictionLayer for layer in step.cache.layers)


def _is_spread(step: Step, inputs: Inputs) -> bool:
    return step.plan.ranks.size > 1 or len({p.device for p in step.decoder.parameters()}) > 1


def _wants_more(step: Step, inputs: Inputs) -> bool:
    by_config = {name: getattr(step.decoder.config, name, False) for name in OF_EVERY_TOKEN}
    given = {name: x for name, x in inputs.items() if name.startswith("output_") and x is not None}
    return any((by_config | given).values())


def _has_hooks(step: Step, inputs: Inputs) -> bool:
    """Whether the decoder has a hook that is not `HARMLESS`. If a search finds none, the next search waits until a hook
    has been registered anywhere in the process."""
    made = RemovableHandle.next_id
    if step.plan.unhooked == made:
        return False
    hooks = [*of_all._global_forward_hooks.values(), *of_all._global_forward_pre_hooks.values()]
    for each in step.decoder.modules():
        hooks += [*each._forward_hooks.values(), *each._forward_pre_hooks.values()]
    found = any(not _module_of(hook).startswith(HARMLESS) for hook in hooks)
    step.plan.unhooked = None if found else made
    return found


def _module_of(hook: object) -> str:
    """The name of the Python module that defines a hook (or the function of a `functools.partial`); "" if unknown."""
    return getattr(getattr(hook, "func", hook), "__module__", None) or ""


LASTING: dict[str, Test] = {  # reasons that hold for all tokens of a model and its policy -> their tests
    "the model is on a {device}": lambda step, inputs: step.positions.device.type not in RECORDERS,
    "the model has layers with a window, a state or latents": _has_other_layers,
    "the model's rotary frequencies depend on the text's length":
        lambda step, inputs: rotary.rope_depends_on_length(step.decoder),
    "the model is spread over devices": _is_spread,
}  # fmt: skip
PASSING: dict[str, Test] = {  # reasons that hold for one call -> their tests
    "the call wants other outputs, which a recorded token does not have": _wants_more,
    "autocast is on": lambda step, inputs: torch.is_autocast_enabled(step.positions.device.type),
    "a function or dispatch mode is on, which would not see a recorded token": lambda step, inputs: is_watched(),
    "modules of the model have hooks, which a recorded token would not call": _has_hooks,
}


def of_plan(step: Step) -> str | None:
    """Return the reason why tokens of this model and policy are never recorded; None if no such reason is known."""
    reason = next((reason for reason, holds in LASTING.items() if holds(step, {})), None)
    return reason and reason.format(device=step.positions.device.type.upper())


def of_call(step: Step, inputs: Inputs) -> str | None:
    """Return the reason why this token is neither recorded nor replayed, or None. inputs: arguments of the decoder's
    forward."""
    return next((reason for reason, holds in PASSING.items() if holds(step, inputs)), None)


def refuse(step: Step, reason: str) -> None:
    """Never record tokens of the step's plan."""
    step.plan.replays, step.plan.unrecorded = False, reason
    tell(step, reason)


def tell(step: Step, reason: str) -> None:
    """Note for the report why a token is not recorded, and warn once where the user asked for recorded tokens."""
    step.meter.unrecorded = reason
    if step.plan.run.compiled is True:
        cautions.once(("compiled", reason), f"compiled=True: tokens are decoded as without it, because {reason}")
