"""The output projection W_O of an attention block. W_O,h denotes its weights for the output of query head h."""

from collections.abc import Iterable

import torch

from ...models import families
from ...ops import _ops
from ...policy.inputs import Slots


def check(modules: Iterable[torch.nn.Module]) -> None:
    """Raise ValueError if the output projection of one of these attention modules cannot be found."""
    for module in modules:
        if families.output_of(module) is None:
            raise ValueError(
                f"{type(module).__name__} has no output projection by a known name ({', '.join(families.OUTPUTS)}), "
                "whose weights this policy needs: take another score or refinement"
            )


def norms(slots: Slots, gram: torch.Tensor) -> torch.Tensor:
    """Compute ||W_O,h v_i||_2 for every query head h and the value v_i of every alive slot i: fp32 [B, H, C]. gram: the
    products W_O,h^T W_O,h, as the function `gram` returns them."""
    kv, stored = slots.kv, slots.kv.stored
    gram = gram.expand(len(slots.n), -1, -1, -1)
    return _ops.quadratic(stored.of("v"), kv.v, kv.first, kv.end, gram, columns=slots.columns).clamp_min(0).sqrt()


def gram(weight: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Compute W_O,h^T W_O,h for every query head h, fp32 [H, D, D], from the weights [H, Dv, E], which are padded with
    zeros from Dv to D, the width of `values` [.., D]. Each chunk computes this anew, since weights may change; the cost
    is that of projecting about a hundred tokens."""
    rows = values.shape[-1] - weight.shape[1]
    padded = torch.nn.functional.pad(weight.to(values.device, torch.float32), (0, 0, 0, rows))
    return torch.einsum("hie,hje->hij", padded, padded)
