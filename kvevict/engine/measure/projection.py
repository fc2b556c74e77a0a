"""The projection after attention, W_O, and the columns fed by each query head."""

from typing import Any

import torch

from ...models import families
from ...ops import _ops
from ...policy.inputs import Slots


def check(modules: Any) -> None:
    """Raise ValueError for attention modules of which one's output projection is not found."""
    for module in modules:
        if families.output_of(module) is None:
            raise ValueError(
                f"{type(module).__name__} has no output projection by a known name ({', '.join(families.OUTPUTS)}), "
                "whose weights this policy needs: take another score or refinement"
            )


def norms(slots: Slots, gram: torch.Tensor) -> torch.Tensor:
    """||W_O,h v_i||_2 of every query head h and its alive slots: fp32 [B, H, C]. gram: as the function below."""
    kv, stored = slots.kv, slots.kv.stored
    gram = gram.expand(len(slots.n), -1, -1, -1)
    return _ops.quadratic(stored.of("v"), kv.v, kv.first, kv.end, gram, columns=slots.columns).clamp_min(0).sqrt()


def gram(weight: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """W_O,h^T W_O,h, fp32 [H, D, D], of weights [H, Dv, E]; padded with zeros from Dv to the width of values [.., D].

    Computed anew for every chunk, so that it always follows the present weights. That costs as much as about a hundred
    tokens in this one projection."""
    rows = values.shape[-1] - weight.shape[1]
    padded = torch.nn.functional.pad(weight.to(values.device, torch.float32), (0, 0, 0, rows))
    return torch.einsum("hie,hje->hij", padded, padded)
