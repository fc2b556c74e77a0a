"""A decoder's rotary embedding: its module, the axes of its positions, and the rotation of queries and keys by it."""

from typing import Any

import torch

from . import compat
from .families import is_latent


def rotary_of(module: torch.nn.Module) -> Any:
    """The child that makes cosine and sine of positions; None where there is none."""
    return next((child for child in module.children() if "Rotary" in type(child).__name__), None)


def rotate(
    decoder: Any, module: Any, x: torch.Tensor, position_from: torch.Tensor, position_to: torch.Tensor
) -> torch.Tensor:
    """Rotate x [B, H, p, D] by the angle between two positions [B]: R(to) R(from)^-1 x, with the model's rotary
    frequencies and pairing of dimensions. position_to [B, n]: the mean over n positions. fp32 in, fp32 out. Only for
    modules that rotate (`trial.rotating`)."""
    rotary = rotary_of(decoder) or rotary_of(module)
    kinds = getattr(decoder.config, "layer_types", None)
    typed = compat.takes(type(rotary).forward, "layer_type")
    layer_type = (kinds[module.layer_idx] if kinds else "full_attention",) if typed else ()
    to = position_to if position_to.ndim == 2 else position_to[:, None]
    positions = torch.cat([position_from[:, None], to], 1).clamp_min(0)
    if axes(decoder):
        positions = positions.expand(axes(decoder), -1, -1)
    angles = rotary(x, positions, *layer_type)
    if isinstance(angles, torch.Tensor):  # [B, 1 + n, rotary / 2] complex, of neighbouring dimensions
        turn = (angles[:, 1:] / angles[:, :1]).mean(1, keepdim=True)
        return _part(module, x, lambda part: _turn_pairs(part, turn))
    cos, sin = angles  # [B, 1 + n, rotary]
    scale = cos[:, :1].square() + sin[:, :1].square()  # the square of the family's attention scaling
    turn_cos = ((cos[:, 1:] * cos[:, :1] + sin[:, 1:] * sin[:, :1]) / scale).mean(1, keepdim=True)
    turn_sin = ((sin[:, 1:] * cos[:, :1] - cos[:, 1:] * sin[:, :1]) / scale).mean(1, keepdim=True)
    if is_latent(decoder.config):  # halves, in whatever order its weights have them
        return _part(module, x, lambda part: part * turn_cos[:, None] + _halves(part) * turn_sin[:, None])
    return compat.apply_rotary(module, x, turn_cos, turn_sin)


def _part(module: Any, x: torch.Tensor, turned: Any) -> torch.Tensor:
    """Rotate the rotary dimensions of x in a latent layer."""
    start = module.qk_nope_head_dim
    stop = start + module.qk_rope_head_dim
    return torch.cat([x[..., :start], turned(x[..., start:stop]), x[..., stop:]], -1)


def _halves(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def _turn_pairs(x: Any, turn: Any) -> Any:
    """Rotate x [B, H, p, D], pairs of neighbouring dimensions, by turn [B, 1, D / 2] complex."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turn[:, None]).flatten(-2).to(x.dtype)


def axes(decoder: torch.nn.Module) -> int:
    """How many axes positions have (M-RoPE, for pictures); 0: they are plain numbers."""
    sections = getattr(rotary_of(decoder), "mrope_section", None)
    if isinstance(sections, dict):  # one for every kind of layer
        sections = next(iter(sections.values()))
    return len(sections or ())


def rope_depends_on_length(decoder: torch.nn.Module) -> bool:
    """Whether the rotary frequencies depend on the longest position of the same call (longrope, dynamic NTK)."""
    kind = getattr(rotary_of(decoder), "rope_type", "default")
    kinds = kind.values() if isinstance(kind, dict) else [kind]
    return any(k == "longrope" or "dynamic" in k for k in kinds)
