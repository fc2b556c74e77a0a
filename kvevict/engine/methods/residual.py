"""The layers' errors by which TADA (a layer budget, EDIE eq. 12-18) splits slots over layers. An error is measured from
the layer's scores and the angle by which the layer rotates the residual stream (METHODS section 4)."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ...context import current
from ...models import families
from ...ops import _ops
from ..read.layer import LayerCall
from ..read.plan import Plan
from ..read.step import Step


class Errors:
    """The layers' errors in one chunk. A layer's error is E_int, the sum of its scores outside the protected slots,
    times the mean of 1 - cos(R, R + O) over the observing and drafted rows. R is the residual stream that enters the
    layer, O what its attention block (`until` = "attention") or the whole layer (`until` = "layer") adds to R.
    """

    def __init__(self, until: str) -> None:
        self.until = until
        self.scores: dict[int, torch.Tensor] = {}  # layer -> its E_int, fp64 [B]
        self.residual: dict[int, torch.Tensor] = {}  # layer -> its R [B, T, E], until `note_rotation` has used it
        # layer -> ([B] sum of 1 - cos(R, R + O) over rows, [B] number of these rows)
        self.rotation: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def note_scores(self, call: LayerCall, score: torch.Tensor) -> None:
        slots = call.slots
        score = call.policy.score.plain(slots, score).expand(-1, slots.n.shape[1], -1).contiguous()
        every = call.policy.refine.refine(slots, score)
        self.scores[slots.index] = every.masked_fill(~slots.competing, 0).double().sum((1, 2))

    def note_rotation(self, step: Step, index: int, after: torch.Tensor) -> None:
        """Add the sum of 1 - cos(R, after) over the call's observing rows, which are its last rows. after: R + O
        [B, T, E] of layer `index`."""
        before = self.residual.pop(index).to(after.device)
        after = after.reshape(before.shape)  # in OPT models the MLP gets [B * T, E]
        counts = step.rows.observing(step)
        rows, counts = max(int(counts.max()), 1), _ops.upload(counts, after.device)
        distance = 1 - torch.cosine_similarity(before[:, -rows:].float(), after[:, -rows:].float(), dim=-1)
        inside = torch.arange(rows, 0, -1, device=after.device) <= counts[:, None]
        total, number = self.rotation.get(index, (0, 0))
        self.rotation[index] = total + (distance.clamp_min(0) * inside).sum(1), number + counts

    def layers(self, plan: Plan, device: torch.device) -> torch.Tensor:
        """Return the errors of the layers that evict: fp64 [layers, B], on `device`."""

        def one(index: int) -> torch.Tensor:
            if index not in self.rotation:
                return self.scores[index]
            total, rows = self.rotation[index]
            return self.scores[index] * (total / rows.clamp_min(1))

        return plan.ranks.sum(torch.stack([one(index).to(device) for index in plan.order]))


def install(
    decoder: torch.nn.Module, until: str, order: Iterable[int], after_attention: Mapping[int, str]
) -> list[RemovableHandle]:
    """Add the hooks that call `Errors.note_rotation`. A hook refers only to the number of its layer, so copies of the
    model are independent.

    after_attention   layer -> name of its submodule whose input is the residual stream after the attention block
    """
    hooks = []
    for index in order:
        layer = families.layers_of(decoder)[index]
        hooks.append(layer.register_forward_pre_hook(partial(_enter, index), with_kwargs=True))
        if until == "attention":
            module = layer.get_submodule(after_attention[index])
            hooks.append(module.register_forward_pre_hook(partial(_after, index, until)))
        else:
            hooks.append(layer.register_forward_hook(partial(_after, index, until)))
    return hooks


def _measuring(until: str | None = None) -> Step | None:
    """Return the running step if it measures errors, at the place `until` if one is given; otherwise None."""
    step = current()
    if step is None or step.chooser is None or step.chooser.errors is None:
        return None
    return step if until in (None, step.chooser.errors.until) else None


def _enter(index: int, module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
    step = _measuring()
    if step is not None:
        step.chooser.errors.residual[index] = args[0] if args else kwargs["hidden_states"]


def _after(index: int, until: str, module: torch.nn.Module, args: tuple, output: Any = None) -> None:
    """Note the residual stream after a layer (from the layer's output) or after its attention block (from the first
    argument of the submodule that follows), if the running step measures at the place `until`."""
    step = _measuring(until)
    if step is not None:
        after = args[0] if output is None else output[0] if isinstance(output, tuple) else output
        with step.meter.clock("evict"):
            step.chooser.errors.note_rotation(step, index, after)
