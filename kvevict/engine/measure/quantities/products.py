from dataclasses import dataclass

import torch

from ....policy.inputs import Observation, Slots
from . import QUANTITIES, Quantity, each_head


@QUANTITIES.add("products")
@dataclass(frozen=True)
class Products(Quantity):
    """The products q k of the observing rows' queries with each slot's key, summed over rows, whether or not a row sees
    the slot; the mean over the query heads of a GQA group: [B, Hkv, C]."""

    def measure(self, slots: Slots, observation: Observation) -> torch.Tensor:
        total: torch.Tensor | None = None
        for part in observation.parts:
            counts = torch.arange(part.q.shape[2], device=part.q.device) >= part.skip[:, None]  # [B, R]
            rows = (part.q.float() * counts[:, None, :, None]).sum(2)  # [B, H, D]
            total = rows if total is None else total + rows
        assert total is not None  # an observation has a part
        kv_heads = slots.kv.stored.len.shape[1]
        mean = total.unflatten(1, (kv_heads, -1)).mean(2)
        out = torch.zeros(*slots.kv.stored.len.shape, slots.columns, device=slots.device)
        for b, h, k in each_head(slots, "k"):
            out[b, h, : len(k)] = k.float() @ mean[b, h]
        return slots.heads.merge(out)
