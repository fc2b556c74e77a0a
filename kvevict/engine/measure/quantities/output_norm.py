from dataclasses import dataclass
from typing import ClassVar

import torch

from ....policy.inputs import Need, Observation, Slots
from .. import projection
from . import QUANTITIES, Quantity, each_head

BLOCK = 1024  # slots whose product with W_O exists at once


@QUANTITIES.add("output_norm")
@dataclass(frozen=True)
class OutputNorm(Quantity):
    """||W_O,h v_i||_1, mean over the query heads h of a group, W_O,h being the output projection's weights for head h:
    [B, Hkv, C], in fp32."""

    observes: ClassVar[bool] = False
    needs: ClassVar[tuple[str | Need, ...]] = ("output_weight",)

    def ready(self, decoder: torch.nn.Module, modules: list[torch.nn.Module]) -> None:
        projection.check(modules)

    def measure(self, slots: Slots, observation: Observation, weight: torch.Tensor) -> torch.Tensor:
        kv = slots.kv
        group = len(weight) // kv.stored.len.shape[1]  # 1 for latents, of which every query head has separate values
        out = torch.zeros(*kv.stored.len.shape, slots.columns, device=slots.device)
        for b, h, v in each_head(slots, "v"):
            for head in weight[h * group : (h + 1) * group]:
                head = head.to(v.device).float()
                norms = [(x.float() @ head).abs().sum(1) for x in v[:, : len(head)].split(BLOCK)]
                out[b, h, : len(v)] += torch.cat(norms) / group
        return slots.heads.merge(out)
