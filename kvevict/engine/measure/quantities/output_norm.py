from dataclasses import dataclass
from typing import ClassVar

import torch

from ....policy.inputs import Need, Observation, Slots
from .. import projection
from . import QUANTITIES, Quantity, each_head

BLOCK = 1024  # number of slots that are multiplied by W_O at once, to bound the memory


@QUANTITIES.add("output_norm")
@dataclass(frozen=True)
class OutputNorm(Quantity):
    """The norm ||W_O,h v_i||_1 of every alive slot's value v_i after the output projection, averaged over the query
    heads h of a group: fp32 [B, Hkv, C]. W_O,h: the output projection's weights for head h."""

    observes: ClassVar[bool] = False
    needs: ClassVar[tuple[str | Need, ...]] = ("output_weight",)

    def ready(self, decoder: torch.nn.Module, modules: list[torch.nn.Module]) -> None:
        projection.check(modules)

    def measure(self, slots: Slots, observation: Observation, weight: torch.Tensor) -> torch.Tensor:
        kv = slots.kv
        group = len(weight) // kv.stored.len.shape[1]  # query heads per head of values; 1 for latents (MLA)
        out = torch.zeros(*kv.stored.len.shape, slots.columns, device=slots.device)
        for b, h, v in each_head(slots, "v"):
            for head in weight[h * group : (h + 1) * group]:
                head = head.to(v.device).float()
                norms = [(x.float() @ head).abs().sum(1) for x in v[:, : len(head)].split(BLOCK)]
                out[b, h, : len(v)] += torch.cat(norms) / group
        return slots.heads.merge(out)
