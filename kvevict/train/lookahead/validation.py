"""Measures how close the lookahead rows' scores are to the true scores (LookaheadKV, table 8)."""

from typing import Any

import torch

from ...models.adapter import Adapter
from ...ops import _ops
from . import passes


@torch.no_grad()
def similarity(decoder: torch.nn.Module, adapter: Adapter, found: passes.Truth) -> dict[str, float]:
    """Compare the lookahead rows' unpooled scores of one prompt with the true scores in `found`. Returns `loss`, and as
    means over layers and kv heads `recall` (of the best eighth of the slots), `recall_512` (of the best 512 slots, or
    of all if there are fewer) and `tau` (Kendall's)."""
    each: list = []

    def note(layer: int, q: torch.Tensor, k: torch.Tensor, slots: _ops.Held, options: dict) -> None:
        got = _scores(q, k, slots, **options)[0, :, : found.tokens]
        want = found.target[layer][0].unflatten(0, (len(got), -1)).mean(1)
        some = (max(1, found.tokens // 8), min(512, found.tokens))
        each.append((*(recall(got, want, k) for k in some), tau(got, want)))

    value = passes.loss(decoder, adapter, found, note).item()
    recalls, best, taus = (torch.stack(part).mean().item() for part in zip(*each))
    return dict(loss=value, recall=recalls, recall_512=best, tau=taus)


def _scores(q: torch.Tensor, k: torch.Tensor, slots: _ops.Held, **options: Any) -> torch.Tensor:
    """Return the attention, averaged over n query rows, to the N slots of a prompt and, causally, to the rows' own keys
    k: [1, Hkv, N + n]."""
    none, options["columns"] = 0 * slots.len[:, 0], k.shape[2] + len(slots.k) // k.shape[1]
    return _ops.score(q, none, slots, k, none, none + k.shape[2], causal=True, reduce="mean", **options)


def recall(got: torch.Tensor, want: torch.Tensor, k: int) -> torch.Tensor:
    """Return the share of the k largest of `want` [.., N] that are also among the k largest of `got` [.., N], averaged
    over the other dimensions."""
    best = torch.zeros_like(want).scatter(-1, got.topk(k, -1).indices, 1)
    return best.gather(-1, want.topk(k, -1).indices).mean()


def tau(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Return Kendall's tau-b of `got` and `want` along the last dimension, averaged over the other dimensions. A row
    whose numbers are all equal counts as 0. Needs scipy."""
    from scipy.stats import kendalltau

    rows = zip(*(x.double().reshape(-1, x.shape[-1]).cpu().numpy() for x in (got, want)), strict=True)
    return torch.tensor([kendalltau(*row).statistic for row in rows]).nan_to_num(0).mean()
