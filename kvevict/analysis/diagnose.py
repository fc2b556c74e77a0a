"""What an eviction costs: how far attention outputs move, how much attention is lost, how alike two choices are.

The first part is maths on tensors of one kv head: q [G, R, D] the queries of its group, k and v [n, D] its slots, sees
[R, n] which of them a row may see, kept [n] which stay. Attention is rows x slots, and at most `ROWS` rows observe.
The second part is what `Policy(diagnose=True)` adds to every eviction of a read.
"""

import numpy as np
import torch

ROWS = 64
NAMES = ("evictions", "joint_error", "output_error", "recall")


def attention(q, k, v, sees, *, scale, softcap=0.0, sinks=None):
    """Softmax attention a [G, R, n] over the slots seen, in fp32, and outputs o [G, R, D]; sinks [G] take a share of
    it. A row that sees nothing gets 0."""
    x = q.float() @ k.float().T * scale
    if softcap:
        x = softcap * torch.tanh(x / softcap)
    x = x.masked_fill(~sees, -torch.inf)
    if sinks is not None:
        x = torch.cat([x, sinks[:, None, None].expand(*x.shape[:2], 1)], 2)
    a = x.softmax(2)[..., : k.shape[0]].masked_fill(~sees, 0)
    return a, a @ v.float()


def joint_error(before, after):
    """CAOTE eq. 24 of a set of slots, the root of the heads' summed squares: outputs [H, R, D] with and without the set
    -> [R].

    Eq. 24 is || sum_S a_i (o - v_i) || / (1 - sum_S a_i), which is || o - o' || with o' the attention renormalised over
    what stays (theorem A.2 for a set); so computed, nothing cancels when the set has nearly all of the attention. With
    all that a row sees gone, o' is 0.
    """
    return (before - after).square().sum((0, 2)).sqrt()


def output_error(before, after):
    """`joint_error` relative to the length of all heads' outputs: [R]."""
    return joint_error(before, after) / before.square().sum((0, 2)).sqrt().clamp_min(torch.finfo(before.dtype).tiny)


def by_group(q, kv_heads, sinks, **options) -> list:
    """Per kv head the queries [G, R, D] of its group, out of q [H, R, D], and the options that `attention` takes."""
    sinks = [None] * kv_heads if sinks is None else sinks.unflatten(0, (kv_heads, -1))
    return [(queries, options | {"sinks": sink}) for queries, sink in zip(q.unflatten(0, (kv_heads, -1)), sinks)]


def cosine(before, after):
    """Cosine of two attentions [G, R, n] over their slots: [G, R]."""
    return torch.cosine_similarity(before, after, dim=2, eps=torch.finfo(before.dtype).tiny)


def l1_loss(before, after) -> float:
    """L1 distance of two tensors, relative to the first one's L1 norm."""
    return float((before - after).abs().sum() / before.abs().sum())


def sparsity(a, share: float = 0.9):
    """The share of slots that hold `share` of an attention [.., n] that sums to 1: [..] (TAKE figure 4)."""
    most = a.sort(-1, descending=True).values.cumsum(-1)
    return ((most < share * most[..., -1:]).sum(-1) + 1) / a.shape[-1]


def caote(weights, v, fast: bool = False):
    """CAOTE eq. 6 of slots [.., n] with weights that sum to 1 and values [.., n, D]: a / (1 - a) * || o - v ||. fast:
    eq. 8, the mean value in place of the output o."""
    at = v.mean(-2) if fast else (weights[..., None] * v).sum(-2)
    return weights / (1 - weights).clamp_min(1e-12) * (at[..., None, :] - v).norm(dim=-1)


def jaccard(a: set, b: set) -> float:
    """Size of the intersection over that of the union; 1 for two empty sets."""
    return len(a & b) / len(a | b) if a | b else 1.0


def overlap(a, b) -> float:
    """Mean `jaccard` of two layers' kept positions, a set per kv head: head g against head g."""
    return sum(map(jaccard, a, b)) / len(a)


# -- while a prompt is read -------------------------------------------------------------------------------------------


def rows(view):
    """Queries [B, H, R, D] that can observe in this call, out of the chunk's."""
    return view.q[:, :, -ROWS:].clone()


@torch.no_grad()
def note(view, choice) -> None:
    """Add to the read's diagnostics what a layer loses by a `kvevict.engine.evict.Choice`."""
    index, keep, every = choice
    cut = np.flatnonzero(every.sum(1) < view.every.sum(1)).tolist()
    with view.step.meter.clock("diagnose"):
        exact: dict = dict(dtype=torch.double, device="cpu")
        sums = view.step.read.diagnostics.setdefault(view.index, torch.zeros(len(NAMES), len(keep), **exact))
        observing = view.policy.rows.observing(view.step).clip(1, ROWS).tolist()
        for b in cut:
            queries = by_group(view.q[b, :, -observing[b] :], view.k.shape[1], **view.options)
            chosen = [index[b, h, : keep[b, h]] for h in range(keep.shape[1])] * (view.k.shape[1] // keep.shape[1])
            heads = [_head(view, b, h, *one) for h, one in enumerate(zip(chosen, *zip(*queries, strict=True)))]
            parts = (view.gather(torch.cat(part)[None])[0] for part in zip(*heads))
            sums[:, b] += torch.tensor([1, *_errors(*parts)], **exact)


def _head(view, b, h, index, q, options):
    """Outputs [G, R, D] with and without what a kv head loses, and attention [G, R] in all and on what it keeps.

    The rows are the call's last, so a new slot is seen by those at or behind its column, a stored one by all.
    """
    slots, stored, first = view.slots, int(view.slots.counts[b, h]), int(view.padding[b])
    old = slice(int(slots.offset[b, h]), int(slots.offset[b, h]) + stored)
    k, v = (torch.cat([x[old], new[b, h, first:]]) for x, new in ((slots.k, view.k), (slots.v, view.v)))
    columns = view.step.positions.shape[1]
    column = torch.arange(len(k), device=k.device) - stored + first
    sees = column <= torch.arange(columns - q.shape[1], columns, device=k.device)[:, None]
    kept = torch.zeros(len(k), dtype=torch.bool, device=k.device)
    kept[index.long()] = True
    a, before = attention(q, k, v, sees, **options)
    _, after = attention(q, k, v, sees & kept, **options)
    return before, after, a.sum(2), (a * kept).sum(2)


def _errors(before, after, mass, kept):
    return joint_error(before, after).mean(), output_error(before, after).mean(), kept.sum() / mass.sum()


def summary(read, layers) -> dict:
    """`NAMES` -> [layer][row] of a read: how many evictions, and means over them; None for a layer not in `layers`."""
    nothing = [0, 0.0, 0.0, 1.0]

    def of(index, i):
        if index is None:
            return None
        sums = read.diagnostics.get(index)
        if sums is None:
            return [nothing[i]] * len(read.seen)
        counts = sums[0].tolist()
        if i == 0:
            return [int(count) for count in counts]
        return [total / count if count else nothing[i] for total, count in zip(sums[i].tolist(), counts)]

    return {name: [of(index, i) for index in layers] for i, name in enumerate(NAMES)}
