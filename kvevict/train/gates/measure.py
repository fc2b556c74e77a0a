"""Measures how well gates predict KVzip's scores of texts that they were not trained on."""

import importlib.util
from typing import Any

import torch

from ...cautions import bar
from ...engine.measure.gates import Gates
from ..lookahead.validation import recall, tau
from .labels import each_layer

SHARES = (0.125, 0.25, 0.5)  # shares of all slots, the best of which the recall counts


def measure(
    model: torch.nn.Module, label: str, known: list[torch.Tensor], gates: Gates, progress: bool = False
) -> dict[str, Any]:
    """Compare the gates' predictions with KVzip's scores of `known`, pieces of token ids. Returns, besides the number
    of tokens:

    r2            R^2 of the logarithms of scores over all layers and heads together, since one ranking compares these
    r2_by_layer   {layer: R^2 of each head alone, averaged over the layer's heads}
    r2_by_head    mean of r2_by_layer over layers
    recall        {share: of the best slots by KVzip's scores, in one ranking of all layers and heads, the part that is
                  also among the best by the gates}
    tau           Kendall's tau, averaged over heads; None if scipy is not installed
    """
    sums: dict = {}  # layer -> float64 [4, heads]: count, sum of y, sum of y^2, sum of squared errors
    recalls, taus = [], []
    for ids in bar(known, "measuring", "piece", progress):
        logs, labels = [], []

        def take(layer: int, x: torch.Tensor, y: torch.Tensor) -> None:
            guess = gates.logs(layer, x[None])[0]
            logs.append(guess.T.cpu())  # noqa: B023
            labels.append(y.T.cpu())  # noqa: B023
            y = y.double()
            parts = torch.stack([torch.ones_like(y), y, y.square(), (y - guess).square()]).sum(1)
            sums[layer] = sums.get(layer, 0) + parts

        each_layer(model, label, ids, take)
        got, want = torch.cat(logs), torch.cat(labels)
        recalls.append([recall(got.flatten(), want.flatten(), max(1, int(share * got.numel()))) for share in SHARES])
        if importlib.util.find_spec("scipy"):
            taus.append(tau(got, want))
    by_layer = {layer: _r2(*parts).mean().item() for layer, parts in sums.items()}
    return dict(
        tokens=sum(map(len, known)), r2=_r2(*sum(parts.sum(1) for parts in sums.values())).item(),
        r2_by_head=sum(by_layer.values()) / len(by_layer), r2_by_layer=by_layer,
        recall=dict(zip(map(str, SHARES), torch.tensor(recalls).mean(0).tolist())),
        tau=torch.stack(taus).mean().item() if taus else None,
    )  # fmt: skip


def _r2(count: torch.Tensor, total: torch.Tensor, squares: torch.Tensor, errors: torch.Tensor) -> torch.Tensor:
    return 1 - errors / (squares - total.square() / count).clamp_min(1e-12)
