"""The projection after attention, W_O: W_O,h are its weights for the values of query head h."""

from collections.abc import Iterable

import torch

from ...models import families
from ...ops import _ops
from ...policy.inputs import Slots


def check(modules: Iterable[torch.nn.Module]) -> None:
    """Raise ValueError unless the output projection of every attention module is found."""
    for module in modules:
        if families.output_of(module) is None:
            raise ValueError(
                f"{type(module).__name__} has no output projection by a known name ({', '.join(families.OUTPUTS)}), "
                "whose weights this policy needs: take another score or refinement"
            )


def norms(slots: Slots, gram: torch.Tensor) -> torch.Tensor:
    """||W_O,h v_i||_2 of every query head h and alive slot i: fp32 [B, H, C]. gram: result of `gram`."""
    kv, stored = slots.kv, slots.kv.stored
    gram = gram.expand(len(slots.n), -1, -1, -1)
    return _ops.quadratic(stored.of("v"), kv.v, kv.first, kv.end, gram, columns=slots.columns).clamp_min(0).sqrt()


def gram(weight: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """W_O,h^T W_O,h, fp32 [H, D, D], of weights [H, Dv, E] padded with zeros from Dv to the width of values [.., D].
    Each chunk computes it, since weights may change; that costs as much as projecting about a hundred tokens."""
    rows = values.shape[-1] - weight.shape[1]
    padded = torch.nn.functional.pad(weight.to(values.device, torch.float32), (0, 0, 0, rows))
    return torch.einsum("hie,hje->hij", padded, padded)
