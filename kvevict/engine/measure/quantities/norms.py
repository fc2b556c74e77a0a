"""Norms and cosines of every alive slot's key or value; for latents, their mean over the heads."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from ....ops import _ops
from ....policy.inputs import Observation, Slots
from . import QUANTITIES, Quantity, per_head


@dataclass(frozen=True)
class Norm(Quantity):
    """The p-norm of every alive slot's key or value."""

    p: int = 2  # 1 or 2
    of: ClassVar[str]  # "k" or "v"
    observes: ClassVar[bool] = False

    def measure(self, slots: Slots, observation: Observation) -> torch.Tensor:
        kv, of = slots.kv, self.of
        norms = _ops.norm(kv.stored.of(of), getattr(kv, of), kv.first, kv.end, p=self.p, columns=slots.columns)
        return slots.heads.merge(norms)


@QUANTITIES.add("key_norm")
@dataclass(frozen=True)
class KeyNorm(Norm):
    """||k_i||_p: [B, Hkv, C]."""

    of: ClassVar[str] = "k"


@QUANTITIES.add("value_norm")
@dataclass(frozen=True)
class ValueNorm(Norm):
    """||v_i||_p: [B, Hkv, C]."""

    p: int = 1
    of: ClassVar[str] = "v"


@QUANTITIES.add("key_cosine")
@dataclass(frozen=True)
class KeyCosine(Quantity):
    """cos(k_i, mean k), with the mean over the head's alive keys: [B, Hkv, C].

    unit   keys are scaled to length 1 before the mean
    """

    unit: bool = False
    observes: ClassVar[bool] = False

    def measure(self, slots: Slots, observation: Observation) -> torch.Tensor:
        def one(keys: torch.Tensor) -> torch.Tensor:
            keys = keys.float()
            mean = (F.normalize(keys, dim=-1) if self.unit else keys).mean(0, keepdim=True)
            return torch.cosine_similarity(keys, mean, dim=-1)

        return per_head(slots, "k", one)
