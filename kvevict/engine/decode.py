"""One decoded token in one layer: it is stored and attends, and only where slots are due to go are they scored."""

import torch

from . import rerotate
from .evict import join
from .layer_call import layer_call
from .schedule import observes


def attend(step, layer, module, query, key, value, new, options) -> tuple:
    """(LayerCall of a layer that is to be scored or None, out [B, 1, H, D])."""
    patch, chooser = step.patch, step.chooser
    columns = layer.longest() + 1 if patch.wants_probs else 0
    with step.meter.clock("decode"), rerotate.in_cache(step, module, layer):
        out, lse, probs = layer.decode(query, *new, step.positions, module, columns=columns, **options)
    layer.advance(1, 1)
    if chooser is None:
        return None, out
    order, policy = patch.order[module.layer_idx], patch.policy
    observing = observes(policy, order, len(patch.order))
    if policy.decode and observing and policy.rows.decoded and not policy.rows.newest:
        remember(policy, layer, query, out if patch.wants_outputs else None)
    probs = probs if patch.wants_probs else None
    if not chooser.due(order, patch.ranks.counts(layer)):
        if policy.carry != "sum" or not observing:
            return None, out
        if policy.score.adds_attention:
            layer.carry = join("sum", probs, layer.carry)
            return None, out
    (k, v), new = ([x[:, :, :0] for x in pair] for pair in ((key, value), new))
    return layer_call(step, layer, module, query, k, v, out, lse, options, probs, new), out


def remember(policy, layer, query, out) -> None:
    """Keep a decoded row [B, H, 1, D], and its output if that is wanted: it will observe."""
    row = query if out is None else torch.cat([query, out.transpose(1, 2)], 3)
    other = layer.decode_queries is None or layer.decode_queries.shape[3] != row.shape[3]  # of another policy
    rows = row if other else torch.cat([layer.decode_queries, row], 2)
    layer.decode_queries = rows[:, :, -policy.rows.decoded :]
