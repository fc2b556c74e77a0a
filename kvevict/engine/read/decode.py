"""One decoded token in one layer: store it, attend, and score the slots only if some are due for eviction."""

import numpy as np
import torch

from ... import _ops
from ...policy.heads.equal import Equal, shares
from ...policy.scores import Score
from ...policy.selections.token import Token
from ..measure.inputs import Source
from ..measure.observation import LayerRows
from ..slots import host
from ..slots.carried import join, of_layer, wide
from .evict import kept
from .layer_call import layer_call, protected
from .schedule import observes


def attend(step, layer, module, query, key, value, new, options, hidden=None) -> tuple:
    """(LayerCall if the layer is to be scored, else None; out [B, 1, H, D])."""
    patch, chooser = step.patch, step.chooser
    columns = layer.longest() + 1 if patch.wants_probs else 0
    with step.meter.clock("decode"):
        out, lse, probs = layer.decode(query, *new, step.positions, module, columns=columns, **options)
    layer.advance(1, 1)
    if patch.of_tokens is not None and observes(patch.policy, patch.order[module.layer_idx], len(patch.order)):
        inputs = Source(step, layer, module, key, hidden).given(patch.of_tokens.needs)
        carry_newest(layer, patch.of_tokens.tokens(*inputs))
    if chooser is None:
        return None, out
    order, policy = patch.order[module.layer_idx], patch.policy
    observing = observes(policy, order, len(patch.order))
    if policy.decode and observing and policy.rows.decoded and not policy.rows.newest:
        remember(policy, layer, query, out if patch.wants_outputs else None)
    probs = probs if patch.wants_probs else None
    due = chooser.due(order, patch.ranks.counts(layer))
    if policy.carry == "sum" and observing and policy.score.adds_attention:
        sums = join("sum", probs, layer.carry)
        if not due:
            layer.carry = of_layer(sums, layer)
            return None, out
        if drops_smallest(policy) and drop(step, layer, module, order, sums):
            return None, out
    elif not due and (policy.carry != "sum" or not observing):
        return None, out
    (k, v), new = ([x[:, :, :0] for x in pair] for pair in ((key, value), new))
    return layer_call(step, layer, module, query, k, v, out, lse, options, probs, new), out


def carry_newest(layer, numbers) -> None:
    """The newest slot of each head carries its number: numbers [B, Hkv, 1]."""
    width, known = layer.longest(), layer.carry
    if known is None:
        known = numbers.new_full((*numbers.shape[:2], width), torch.nan)
    layer.carry = wide(known, width).scatter(2, (layer.len - 1).long()[..., None], numbers)


def drops_smallest(policy) -> bool:
    """True if each head drops the slots with its smallest sums of attention, regardless of other heads."""
    apart = policy.n_reuse == 1 and policy.warmup_layers in (None, 1) and type(policy.heads) is Equal
    apart = apart and not policy.keep_prompt
    plain = type(policy.score).pooled is Score.pooled and not policy.score.factors and not policy.refine.refines
    return apart and plain and type(policy.select) is Token and not policy.select_by_layer


def drop(step, layer, module, order, sums) -> bool:
    """Cut a layer to its budget by sums [B, Hkv, C] of its slots, with the result of a `LayerCall` but without one.
    False, and nothing is done, if the heads' equal shares exceed the slots of some head."""
    counts, policy = layer.counts, step.patch.policy
    slots, heads = step.chooser.decisions.kept(order, counts.sum(1)), counts.shape[1]
    keep = shares(slots, np.arange(heads))
    if step.patch.ranks.size > 1 or (keep > counts).any():
        return False
    with step.meter.clock("evict"):
        budget, none = (layer.budget, step.patch.kv_heads), step.first.clamp_max(0)
        rows = LayerRows(step.call_rows, *budget, None, None, None, None, 0, none)
        first, last = protected(policy, step.rows, policy.select, rows, counts.max(1))
        wanted = host.upload(keep, sums.device, torch.int32)
        index = _ops.select(sums.contiguous(), layer.len, wanted, first, last, int(keep.max()))
        layer.keep(index, keep)
        level = keep.min() == keep.max()  # the index has no -1
        layer.carry = sums.gather(2, index.long()) if level else kept(sums, index, torch.nan)
        step.meter.live[module.layer_idx] = layer.live_bytes()
    return True


def remember(policy, layer, query, out) -> None:
    """Keep a decoded row [B, H, 1, D] for observing, with its output if that is wanted."""
    row = query if out is None else torch.cat([query, out.transpose(1, 2)], 3)
    other = layer.decode_queries is None or layer.decode_queries.shape[3] != row.shape[3]  # of another policy
    rows = row if other else torch.cat([layer.decode_queries, row], 2)
    layer.decode_queries = rows[:, :, -policy.rows.decoded :]
