"""How one layer's gates are fitted, piece by piece."""

import math
from typing import Any

import torch
from torch import nn

from ..processes import Processes


class Linear:
    """Ridge regression in closed form on sums of products in float64; inputs count in standard deviations.

    ridge   added to each input's variance, as a share of it
    """

    def __init__(self, settings):
        self.ridge, self.products = settings.ridge, None

    def add(self, x: torch.Tensor, y: torch.Tensor, progress: float) -> None:
        """Add rows x [T, E], y [T, heads]; progress: the share of all pieces that came before."""
        rows = torch.cat([torch.ones_like(x[:, :1]), x, y], 1).double()
        product = torch.cat([torch.ones_like(x[:, :1]), x], 1).double().T @ rows
        self.products = product if self.products is None else self.products.add_(product)

    def join(self, processes: Processes) -> None:
        """Add the rows of other processes' fits of the same layer."""
        self.products = processes.sum(self.products)

    def affines(self) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
        """((weight [heads, E], bias [heads]),) fp32."""
        own = len(self.products)
        mean = self.products[0] / self.products[0, 0]
        centred = self.products[1:] / self.products[0, 0] - mean[1:own, None] * mean
        covariance, both = centred[:, 1:own], centred[:, own:]
        variance = covariance.diagonal()
        most = variance.max().clamp_min(1e-30)
        weight = torch.linalg.solve(covariance + torch.diag(self.ridge * variance + 1e-9 * most), both)
        return ((weight.T.float(), (mean[own:] - mean[1:own] @ weight).float()),)

    def state(self) -> dict[str, Any]:
        return dict(products=self.products)

    def load(self, state: dict[str, Any]) -> None:
        self.products = state["products"]


class MLP:
    """E -> E / 8 -> heads with GELU (KVzap), AdamW on the mean squared error; each piece's rows are gone through
    `repeats` times while they are there, in random batches. Inputs count in the first piece's standard deviations."""

    repeats, batch, lr, clip = 8, 512, 5e-3, 1.0

    def __init__(self, settings):
        self.seed, self.net = settings.seed, None

    def _make(self, x, y):
        inner = max(1, x.shape[1] // 8)
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(self.seed)
            self.net = nn.Sequential(nn.Linear(x.shape[1], inner), nn.GELU(), nn.Linear(inner, y.shape[1]))
        self.net = self.net.to(x.device)
        self.mean, self.deviation = x.mean(0), x.std(0).clamp_min(1e-6)
        with torch.no_grad():
            self.net[2].bias.copy_(y.mean(0))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=self.lr)
        self.seen = 0

    def add(self, x: torch.Tensor, y: torch.Tensor, progress: float) -> None:
        x = x.float()
        if self.net is None:
            self._make(x, y)
        x = (x - self.mean) / self.deviation
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * 0.5 * (1 + math.cos(math.pi * progress))
        order = torch.Generator().manual_seed(self.seed + self.seen)
        self.seen += 1
        for _ in range(self.repeats):
            for rows in torch.randperm(len(x), generator=order).to(x.device).split(self.batch):
                with torch.enable_grad():
                    (self.net(x[rows]) - y[rows]).square().mean().backward()
                nn.utils.clip_grad_norm_(self.net.parameters(), self.clip)
                self.optimizer.step()
                self.optimizer.zero_grad()

    def affines(self) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
        first, _, last = self.net
        weight = (first.weight / self.deviation).detach()
        bias = (first.bias - weight @ self.mean).detach()
        return (weight, bias), (last.weight.detach(), last.bias.detach())

    def state(self) -> dict[str, Any]:
        return dict(net=self.net.state_dict(), optimizer=self.optimizer.state_dict(), mean=self.mean,
                    deviation=self.deviation, seen=self.seen)  # fmt: skip

    def load(self, state: dict[str, Any]) -> None:
        self._make(torch.zeros(2, len(state["mean"])), torch.zeros(2, len(state["net"]["2.bias"])))
        self.net.to(state["mean"].device).load_state_dict(state["net"])
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=self.lr)
        self.optimizer.load_state_dict(state["optimizer"])
        self.mean, self.deviation, self.seen = state["mean"], state["deviation"], state["seen"]


FITS = {"linear": Linear, "mlp": MLP}
