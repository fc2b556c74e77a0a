from dataclasses import dataclass
from typing import Any

from ..checks import count
from ..inputs import Policy
from . import LAYERS, LayerBudget


@LAYERS.add("pyramid")
@dataclass(frozen=True)
class Pyramid(LayerBudget):
    """PyramidKV (Cai et al. 2024): slots decrease arithmetically from the first layer to the last.

    With b = B - protected slots, the last layer gets b // beta of these and the first 2b - b // beta, or as many as
    there are. Prompts shorter than 2b tokens are split uniformly. The source truncates the step to a whole number and
    so keeps somewhat more than b per layer; here the layers' sum is exact.
    """

    beta: int = 20

    def check(self, policy: Policy) -> None:
        count("beta", self.beta, 1)

    def shares(self, policy: Policy, layers: int, tokens: int, measured: Any = None) -> list[float]:
        protected = policy.protected
        mean = policy.slots(tokens) - protected
        if tokens < 2 * mean or layers == 1:
            return [1.0] * layers
        least = mean // self.beta
        most = min(2 * mean - least, tokens - protected)
        least = 2 * mean - most
        return [protected + most - layer * (most - least) / (layers - 1) for layer in range(layers)]
