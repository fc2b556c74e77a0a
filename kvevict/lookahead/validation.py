"""How close learned scores are to the true ones (LookaheadKV, table 8)."""

import torch

from .. import _ops
from . import passes

MOST = 512  # evenly spaced columns of a pair that Kendall's tau takes, as it compares every two


@torch.no_grad()
def similarity(decoder, adapter, prompt, response) -> dict:
    """Loss of one pair, ids [N] and [R], and means over layers and kv heads of the unpooled scores' `tau` and of their
    `recall` of the best eighth."""
    found, each = passes.truth(decoder, prompt, response), []

    def note(layer, q, k, slots, options):
        got = _scores(q, k, slots, **options)[0, :, : found.tokens]
        want = found.target[layer][0].unflatten(0, (len(got), -1)).mean(1)
        each.append((recall(got, want, max(1, found.tokens // 8)), tau(got, want)))

    value = passes.loss(decoder, adapter, found, note).item()
    recalls, taus = (torch.stack(part).mean().item() for part in zip(*each))
    return dict(loss=value, recall=recalls, tau=taus)


def _scores(q, k, slots, **options):
    """[1, Hkv, N + n] mean attention of rows q to the prompt's slots and, causally, to their own keys k."""
    none, columns = 0 * slots.len[:, 0], k.shape[2] + len(slots.k) // k.shape[1]
    args = (q, none, slots.k, slots.offset, slots.len, k, none, none + k.shape[2])
    return _ops.score(*args, causal=True, reduce="mean", columns=columns, **options)


def recall(got, want, k: int):
    """The share of the k best of `want` [.., N] that are among the k best of `got`, mean over the other dimensions."""
    best = torch.zeros_like(want).scatter(-1, got.topk(k, -1).indices, 1)
    return best.gather(-1, want.topk(k, -1).indices).mean()


def tau(got, want):
    """Kendall's tau-a of [.., N] over at most MOST evenly spread columns, mean over the other dimensions."""
    columns = torch.linspace(0, got.shape[-1] - 1, min(MOST, got.shape[-1])).round().long().to(got.device)
    total, got, want = 0, got[..., columns], want[..., columns]
    for shift in range(1, len(columns)):  # every pair once
        total += ((got[..., shift:] - got[..., :-shift]) * (want[..., shift:] - want[..., :-shift])).sign().sum(-1)
    return (total / max(1, len(columns) * (len(columns) - 1) / 2)).mean()
