"""How one layer's gates are fitted, piece by piece."""

from typing import Any

import torch

from ..processes import Processes


class Fit:
    """Ridge regression in closed form on sums of products in float64; inputs count in standard deviations.

    ridge   added to each input's variance, as a share of it
    """

    def __init__(self, ridge: float) -> None:
        self.ridge = ridge
        self.products: Any = None  # float64 [1 + E, 1 + E + heads]

    def add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add rows x [T, E], y [T, heads]."""
        rows = torch.cat([torch.ones_like(x[:, :1]), x, y], 1).double()
        product = torch.cat([torch.ones_like(x[:, :1]), x], 1).double().T @ rows
        self.products = product if self.products is None else self.products.add_(product)

    def join(self, processes: Processes) -> None:
        """Add the rows of other processes' fits of the same layer."""
        self.products = processes.sum(self.products)

    def affine(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(weight [heads, E], bias [heads]) fp32."""
        own = len(self.products)
        mean = self.products[0] / self.products[0, 0]
        centred = self.products[1:] / self.products[0, 0] - mean[1:own, None] * mean
        covariance, both = centred[:, 1:own], centred[:, own:]
        variance = covariance.diagonal()
        most = variance.max().clamp_min(1e-30)
        weight = torch.linalg.solve(covariance + torch.diag(self.ridge * variance + 1e-9 * most), both)
        return weight.T.float(), (mean[own:] - mean[1:own] @ weight).float()
