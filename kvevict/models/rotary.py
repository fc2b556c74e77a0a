"""Finds a decoder's rotary embedding and its number of position axes, and rotates queries and keys with it."""

from typing import Any

import torch
from torch.nn import Module

from . import compat
from .families import is_latent


def rotary_of(module: Module) -> Any:
    """Return the child of a module that is a rotary embedding (it computes cosine and sine of positions); None if no
    child is one."""
    return next((child for child in module.children() if "Rotary" in type(child).__name__), None)


def rotate(
    decoder: Module, module: Module, x: torch.Tensor, position_from: torch.Tensor, position_to: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Rotate fp32 x [B, H, p, D] from position_from [B] to position_to [B], that is R(to) R(from)^-1 x, with the
    model's rotary frequencies and pairing of dimensions. With position_to [B, n] the result is the mean over the n
    rotations. The attention module must rotate its queries and keys (`trial.rotating`)."""
    rotary = rotary_of(decoder) or rotary_of(module)
    kinds = getattr(decoder.config, "layer_types", None)
    typed = compat.takes(type(rotary).forward, "layer_type")
    layer_type = (kinds[module.layer_idx] if kinds else "full_attention",) if typed else ()
    to = position_to if position_to.ndim == 2 else position_to[:, None]
    positions = torch.cat([position_from[:, None], to], 1).clamp_min(0)
    if axes(decoder):
        positions = positions.expand(axes(decoder), -1, -1)
    angles = rotary(x, positions, *layer_type)
    if isinstance(angles, torch.Tensor):  # complex [B, 1 + n, rotary / 2]: neighbouring dimensions form pairs
        factor = (angles[:, 1:] / angles[:, :1]).mean(1, keepdim=True)
        before, part, after = _split(module, x)
        pairs = torch.view_as_complex(part.float().unflatten(-1, (-1, 2)).contiguous())
        rotated = torch.view_as_real(pairs * factor[:, None]).flatten(-2).to(x.dtype)
        return torch.cat([before, rotated, after], -1)
    cos, sin = angles  # [B, 1 + n, rotary]
    scale = cos[:, :1].square() + sin[:, :1].square()  # square of `attention_scaling`, a factor of cos and sin (YaRN)
    new_cos = ((cos[:, 1:] * cos[:, :1] + sin[:, 1:] * sin[:, :1]) / scale).mean(1, keepdim=True)
    new_sin = ((sin[:, 1:] * cos[:, :1] - cos[:, 1:] * sin[:, :1]) / scale).mean(1, keepdim=True)
    # Latent attention (MLA): dimension i is paired with i + rotary / 2, whatever the order of the weights
    if is_latent(decoder.config):
        before, part, after = _split(module, x)
        first, second = part.chunk(2, -1)
        rotated = part * new_cos[:, None] + torch.cat([-second, first], -1) * new_sin[:, None]
        return torch.cat([before, rotated, after], -1)
    return compat.apply_rotary(module, x, new_cos, new_sin)


def _split(module: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Split x [.., D] of a layer with latent attention (MLA) into (dimensions before the rotated ones, rotated
    dimensions, dimensions after them)."""
    rest = x.shape[-1] - module.qk_nope_head_dim - module.qk_rope_head_dim
    return x.split([module.qk_nope_head_dim, module.qk_rope_head_dim, rest], -1)


def axes(decoder: Module) -> int:
    """Return the number of axes that a decoder's positions have (M-RoPE, for pictures); 0 if a position is a single
    number."""
    sections = getattr(rotary_of(decoder), "mrope_section", None)
    if isinstance(sections, dict):  # kind of layer -> its sections
        sections = next(iter(sections.values()))
    return len(sections or ())


def rope_depends_on_length(decoder: Module) -> bool:
    """Whether the rotary frequencies depend on the largest position of a call (longrope, dynamic NTK)."""
    kind = getattr(rotary_of(decoder), "rope_type", "default")
    kinds = kind.values() if isinstance(kind, dict) else [kind]
    return any(k == "longrope" or "dynamic" in k for k in kinds)
