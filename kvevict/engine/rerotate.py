"""Positions within the cache (StreamingLLM, Xiao et al. 2023, section 3.2): distances count slots, not tokens.

RoPE attention depends on differences of positions only. So rows keep their tokens' positions and slots their keys as
they came; while rows attend, slot i of n is rotated to p - n + i, p being the position of the first row. Slots at
0..n-1 and rows from n on have the same distances, but keys moved there after every eviction would be rounded each time
(in bf16, a rotation by one position rounds to none in the slow dimensions), and a slot's position in the text would be
lost.
"""

import contextlib

import torch
import torch.nn.functional as F

from .. import families
from .latent import LatentLayer


def check(policy, rope_depends_on_length: bool, measures: bool = False) -> None:
    """Raise ValueError for a model whose keys cannot be rotated by a difference of positions.

    rope_depends_on_length: the model's rotary frequencies change with the prompt's length.
    measures: what the policy measures rotates keys or queries.
    """
    if measures and rope_depends_on_length:
        raise ValueError(
            f"score {type(policy.score).__name__} rotates keys back to what they were before positions, and this "
            "model's rotary frequencies change with the prompt's length (longrope, dynamic): take another score"
        )
    if policy.rerotate and rope_depends_on_length:
        raise ValueError(
            "rerotate=True rotates keys from one position to another, and this model's rotary frequencies change with "
            "the prompt's length (longrope, dynamic): pass rerotate=False"
        )


_AS_STORED = contextlib.nullcontext()


def in_cache(step, module, layer, held=None):
    """Inside, if the policy rerotates, the layer's slots, the first held [B, Hkv] of each head (None: all), are at the
    positions right before this call's rows."""
    if not (step.patch.policy.rerotate and step.patch.rotates[module.layer_idx]):
        return _AS_STORED
    return _rotated(step, module, layer, held)


@contextlib.contextmanager
def _rotated(step, module, layer, held):
    held = layer.len if held is None else held
    column = torch.arange(layer.longest(), device=layer.device)
    stored = column < held[..., None]  # [B, Hkv, C]
    row = step.first.clamp_max(step.positions.shape[1] - 1)[:, None].long()
    target = (step.positions.gather(1, row) - held)[..., None] + column
    shift = target[stored] - layer.pos[(layer.offset[..., None] + column)[stored]]
    moves = shift.nonzero()[:, 0]  # where slots are missing only after the sinks, the sinks alone

    def rows():  # decoding may move the buffers
        return (layer.offset[..., None] + column)[stored][moves]

    own = _keys(layer, module, rows())
    if len(own):
        forth, back = shift[moves].clamp_min(0), (-shift[moves]).clamp_min(0)
        rotated = families.rotate(step.decoder, module, own[:, None, None].float(), back, forth)
        _put(layer, module, rows(), rotated[:, 0, 0].to(own.dtype))
    try:
        yield
    finally:
        _put(layer, module, rows(), own)


def _keys(layer, module, rows):
    """Stored keys [n, D]; of latents their rotated part, where a head's key has it."""
    if not isinstance(layer, LatentLayer):
        return layer.k[rows]
    latent, rotated = layer.widths
    both = torch.cat([layer.k[rows], layer.v[rows]], -1)
    return F.pad(both[:, latent : latent + rotated], (module.qk_nope_head_dim, 0))


def _put(layer, module, rows, keys) -> None:
    """Store what `_keys` gave, or that rotated."""
    if not isinstance(layer, LatentLayer):
        layer.k[rows] = keys
        return
    latent, rotated = layer.widths
    both = torch.cat([layer.k[rows], layer.v[rows]], -1)
    both[:, latent : latent + rotated] = keys[:, module.qk_nope_head_dim :]
    layer.k[rows], layer.v[rows] = both.chunk(2, -1)
