"""Norms and cosines of every alive slot's key or value; for latents (MLA), the mean over the heads that share one."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from ....ops import _ops
from ....policy.inputs import Observation, Slots
from . import QUANTITIES, Quantity, per_head


@dataclass(frozen=True)
class Norm(Quantity):
    """Base class: the p-norm of every alive slot's key or value, [B, Hkv, C]."""

    p: int = 2  # the norm: 1 or 2
    of: ClassVar[str]  # whose norm: "k" for keys, "v" for values
    observes: ClassVar[bool] = False

    def measure(self, slots: Slots, observation: Observation) -> torch.Tensor:
        kv, of = slots.kv, self.of
        norms = _ops.norm(kv.stored.of(of), getattr(kv, of), kv.first, kv.end, p=self.p, columns=slots.columns)
        return slots.heads.merge(norms)


@QUANTITIES.add("key_norm")
@dataclass(frozen=True)
class KeyNorm(Norm):
    """The norm ||k_i||_p of every alive slot's key: [B, Hkv, C]."""

    of: ClassVar[str] = "k"


@QUANTITIES.add("value_norm")
@dataclass(frozen=True)
class ValueNorm(Norm):
    """The norm ||v_i||_p of every alive slot's value: [B, Hkv, C]."""

    p: int = 1
    of: ClassVar[str] = "v"


@QUANTITIES.add("key_cosine")
@dataclass(frozen=True)
class KeyCosine(Quantity):
    """The cosine between each alive slot's key and the mean of its head's alive keys: [B, Hkv, C].

    unit   whether keys are scaled to length 1 before the mean is taken
    """

    unit: bool = False
    observes: ClassVar[bool] = False

    def measure(self, slots: Slots, observation: Observation) -> torch.Tensor:
        def one(keys: torch.Tensor) -> torch.Tensor:
            keys = keys.float()
            mean = (F.normalize(keys, dim=-1) if self.unit else keys).mean(0, keepdim=True)
            return torch.cosine_similarity(keys, mean, dim=-1)

        return per_head(slots, "k", one)
