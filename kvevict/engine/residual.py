"""How far a layer turns the residual stream: hooks that a layer budget asks for (EDIE's TADA, the factor of eq. 12)."""

from functools import partial

import numpy as np
import torch

from .. import compat
from . import host
from .step import current


def install(decoder, state) -> list:
    """Hooks that note 1 - cos(R, R + O) of a chunk, the factor of a layer's error: R the residual stream that enters a
    layer, O what its attention block (or the whole layer) adds. The hooks know their layer's number only, so that
    copies of the model stay independent."""
    until, hooks = state.policy.layers.residual, []
    if until == "off":
        return hooks
    for index in state.order:
        layer = decoder.layers[index]
        hooks.append(layer.register_forward_pre_hook(partial(_enter, index), with_kwargs=True))
        if until == "attention":
            hooks.append(compat.after_attention(layer).register_forward_pre_hook(partial(_behind_attention, index)))
        else:
            hooks.append(layer.register_forward_hook(partial(_behind_layer, index)))
    return hooks


def _enter(index, module, args, kwargs):
    step = current()
    if step is not None and step.measured is not None:
        step.residual[index] = args[0] if args else kwargs["hidden_states"]


def _behind_attention(index, module, args):
    _turn(index, args[0])


def _behind_layer(index, module, args, output):
    _turn(index, output[0] if isinstance(output, tuple) else output)


def _turn(index, after):
    step = current()
    if step is None or step.measured is None:
        return
    with step.patch.clock("evict"):
        before = step.residual.pop(index)
        counts = observers(step, after.shape[1])
        rows, counts = max(int(counts.max()), 1), host.upload(counts, after.device)
        turn = 1 - torch.cosine_similarity(before[:, -rows:].float(), after[:, -rows:].float(), dim=-1)
        inside = torch.arange(rows, 0, -1, device=after.device) <= counts[:, None]
        step.turned[index] = (turn.clamp_min(0) * inside).sum(1) / counts.clamp_min(1)


def observers(step, rows):
    """[B] how many of the last rows of this call observe, on the host: the probe, the score's window, or all."""
    score, tokens = step.patch.policy.score, rows - step.padding
    if step.read.probe_length is not None:
        return np.minimum(step.read.probe_length, tokens)
    if score.carries or not (score.rows or score.last_row):
        return tokens
    return np.minimum(tokens, score.rows or 1)
