"""The projection after attention, W_O, and the columns fed by each query head."""

from typing import Any

import torch

from ... import _ops, families
from ...policy.inputs import Slots


def check(module: Any) -> None:
    """Raise ValueError for an attention module whose output projection is not found."""
    if families.output_of(module) is None:
        raise ValueError(
            f"{type(module).__name__} has no output projection by a known name ({', '.join(families.OUTPUTS)}), whose "
            "weights this score needs: take another one, such as kvzip"
        )


def norms(slots: Slots, gram: torch.Tensor) -> torch.Tensor:
    """||W_O,h v_i||_2 of every query head h and its alive slots: fp32 [B, H, C]. gram: as the function below."""
    kv, stored = slots.kv, slots.kv.stored
    gram = gram.expand(len(slots.n), -1, -1, -1)
    return _ops.quadratic(stored.of("v"), kv.v, kv.first, kv.end, gram, columns=slots.columns).clamp_min(0).sqrt()


def gram(module: Any, heads: Any, values: torch.Tensor) -> torch.Tensor:
    """W_O,h^T W_O,h, fp32 [H, D, D], padded with zeros from the heads' width to that of values [.., D].

    Computed anew for every chunk, so that it always follows the present weights. That costs as much as about a hundred
    tokens in this one projection."""
    width = families.value_dim(module, module.config)
    matrix = _matrix(families.output_of(module), heads * width, values).unflatten(1, (heads, width))
    padded = torch.nn.functional.pad(matrix, (0, values.shape[-1] - width))
    return torch.einsum("ehi,ehj->hij", padded, padded)


def _matrix(projection: Any, inputs: int, values: torch.Tensor) -> torch.Tensor:
    """fp32 [E, inputs]: a rank's part of the weights. If the projection is more than a matrix in memory (quantised,
    offloaded, with an adapter), its outputs for unit vectors."""
    from transformers.pytorch_utils import Conv1D

    weight = getattr(projection, "weight", None)
    if type(projection) in (torch.nn.Linear, Conv1D) and not weight.is_meta:
        weight = weight.to_local() if hasattr(weight, "to_local") else weight
        return (weight if type(projection) is torch.nn.Linear else weight.T).to(values.device, torch.float32)
    units = torch.eye(inputs, dtype=values.dtype, device=values.device)
    return (projection(units).float() - projection(0 * units[:1]).float()).T
