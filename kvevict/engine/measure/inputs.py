"""Computes the inputs that quantities name in `needs`, besides the `Slots` and the `Observation` that every quantity
gets. Only inputs that a quantity of the policy names are computed."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from ...models import families
from ...policy.inputs import Need, as_needs
from ...policy.registry import Registry
from . import gates, moments, projection
from .rope import Rope

INPUTS = Registry("input of a quantity", listed=True)


def given(at: Any, quantities: Iterable[Any]) -> dict[Need, Any]:
    """Compute the inputs that `quantities` need, by `Need`. at: a layer's `kvevict.engine.read.layer.LayerCall`."""
    needs = dict.fromkeys(each for quantity in quantities for each in as_needs(quantity.needs))
    return {each: INPUTS[each.name](at, **dict(each.options)) for each in needs}


def rope_of(step: Any, module: Any) -> Rope:
    """The `Rope` of an attention module in a step (`kvevict.engine.read.step.Step`)."""
    return Rope(step.decoder, module, step.plan.rotates.get(module.layer_idx))


INPUTS.update({
    "rope": lambda at: rope_of(at.step, at.module),  # the layer's `Rope`
    "hidden": lambda at: at.hidden,  # [B, T, E] the input of the layer's attention block
    # (k, v) [B, heads, p, D] of the p rows that are read after the chunk and not stored
    "appended": lambda at: (at.k[:, :, at.columns :], at.v[:, :, at.columns :]),
    # the layer's `Gates.numbers` as a function of "hidden" above; folder None: the gates that `gates.own` finds
    "gates": lambda at, folder: partial(gates.loaded(folder, at.step.decoder).numbers, at.index, at.step.plan.ranks),
    # the last result of `Quantity.accumulate` in this layer, by its name `of` (`Quantity.remembers`); None: no result
    "memory": lambda at, of: at.layer.memory.get(of),
    # fp32 [B, Hkv, *] the numbers that stored slots carry, NaN for a slot without a number; None: no slot has one
    "carried": lambda at: at.layer.carry,
    "ends_prompt": lambda at: at.step.ends_prompt,  # True for a prompt's last chunk
})  # fmt: skip


@INPUTS.add("output_weight")
def _output_weight(at: Any) -> torch.Tensor:
    """The weights of the output projection, by query head of this rank: [H, Dv, E]."""
    weight = families.output_weight(at.module, at.k.dtype, at.step.plan.ranks.size > 1)
    return weight.T.unflatten(0, (at.step.plan.local_heads[0], -1))


@INPUTS.add("output_gram")
def _output_gram(at: Any) -> torch.Tensor:
    """The products W_O,h^T W_O,h for each query head h of this rank, W_O,h being the output projection's weights for
    head h: fp32 [H, D, D]."""
    return projection.gram(_output_weight(at), at.k)


@INPUTS.add("moments")
def _moments(at: Any, stats: str | None = None) -> tuple[torch.Tensor, ...]:
    """(mean [B, H, D], covariance [B, H, D, D], mean size [B, H, D]) of a layer's queries before rotation. stats: the
    file that has them; None: take them over all queries that were read into the cache."""
    plan, like = at.step.plan, at.k
    batch, heads, width = like.shape[0], plan.local_heads[0], like.shape[3]
    if stats is None:
        past = at.layer.memory.get("moments")
        none = like.new_zeros(batch, heads, 1 + width, 1 + width).float()
        each = list(moments.summed(none if past is None else past))
    else:
        known = moments.loaded(stats, at.step.decoder)[at.module.layer_idx]
        each = [plan.ranks.mine(x[None]).expand(batch, *(-1,) * x.ndim) for x in known]
        pad = width - each[0].shape[-1]
        each = [torch.nn.functional.pad(x, (0, pad) * (x.ndim - 2)) for x in each]
    return tuple(x.to(like.device) for x in each)


@INPUTS.add("last_position")
def _last_position(at: Any) -> torch.Tensor:
    """The position of the last token that was read, without appended rows: int64 [B]."""
    step = at.step
    tokens = step.positions.shape[1] - step.appended
    # A step without new tokens repeats the prompt; its first row has the position after the prompt's last token.
    return (step.positions[:, tokens - 1] if tokens else step.positions[:, 0] - 1).long()
