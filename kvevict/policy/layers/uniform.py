from dataclasses import dataclass
from typing import Any

from ..inputs import Policy
from . import LAYERS, LayerBudget


@LAYERS.add("uniform")
@dataclass(frozen=True)
class Uniform(LayerBudget):
    """Every layer gets B."""

    def shares(self, policy: Policy, layers: int, tokens: int, measured: Any = None) -> list[float]:
        return [1.0] * layers
