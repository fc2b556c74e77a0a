"""How alike two attentions, two choices of slots and two caches are, and the maths of one head that
`kvevict.engine.watch.diagnostics` measures an eviction with."""

import torch

from ...engine.watch.diagnostics import NAMES, ROWS, attention, by_group, joint_error, output_error

__all__ = [
    "NAMES", "ROWS", "attention", "by_group", "caote", "cosine", "jaccard", "joint_error", "l1_loss", "output_error",
    "overlap", "sparsity",
]  # fmt: skip


def cosine(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Cosine of two attentions [G, R, n] over their slots: [G, R]."""
    return torch.cosine_similarity(before, after, dim=2, eps=torch.finfo(before.dtype).tiny)


def l1_loss(before: torch.Tensor, after: torch.Tensor) -> float:
    """L1 distance of two tensors, relative to the first one's L1 norm."""
    return float((before - after).abs().sum() / before.abs().sum())


def sparsity(a: torch.Tensor, share: float = 0.9) -> torch.Tensor:
    """The share of slots that hold `share` of an attention [.., n] that sums to 1: [..] (TAKE figure 4)."""
    most = a.sort(-1, descending=True).values.cumsum(-1)
    return ((most < share * most[..., -1:]).sum(-1) + 1) / a.shape[-1]


def caote(weights: torch.Tensor, v: torch.Tensor, fast: bool = False) -> torch.Tensor:
    """CAOTE eq. 6 of slots [.., n] with weights that sum to 1 and values [.., n, D]: a / (1 - a) * || o - v ||. fast:
    eq. 8, the mean value in place of the output o."""
    at = v.mean(-2) if fast else (weights[..., None] * v).sum(-2)
    return weights / (1 - weights).clamp_min(1e-12) * (at[..., None, :] - v).norm(dim=-1)


def jaccard(a: set, b: set) -> float:
    """Size of the intersection over that of the union; 1 for two empty sets."""
    return len(a & b) / len(a | b) if a | b else 1.0


def overlap(a: list[set[int]], b: list[set[int]]) -> float:
    """Mean `jaccard` of two layers' kept positions, a set per kv head: head g against head g."""
    return sum(map(jaccard, a, b)) / len(a)
