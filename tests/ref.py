"""Every op and every formula of METHODS in a few lines of float64 torch, independent of csrc and of the package.

First the ops of csrc/kvevict.h with the arguments of kvevict/_ops.py, then the methods' formulas for one layer
of one batch row: q [H, R, d], k [Hkv, n, d], scores [Hkv, n].
"""

import itertools
import math

import torch
import torch.nn.functional as F

INF = float("inf")


def alive(slots, offset, len, new):
    """One head's alive slots [stored | new]."""
    return torch.cat([slots[offset : offset + len], new]).double()


def attention(q, keys, sees, scale, softcap=0.0, sinks=None, lse=None):
    """a [R, n], lse [R] of one head's rows, the sink's share included; unseen slots have no part in it, NaN or not."""
    x = q.double() @ keys.T * scale
    x = softcap * torch.tanh(x / softcap) if softcap > 0 else x
    x = x.masked_fill(~sees, -INF)
    if lse is None:
        sink = x.new_full((1,), -INF) if sinks is None else sinks.double()
        lse = torch.logsumexp(torch.cat([x, sink.expand(x.shape[0], 1)], 1), 1)
    return (x - lse[:, None]).exp().masked_fill(~sees, 0.0), lse


def attend(q, k_slots, v_slots, offset, len, k, v, first, scale, softcap=0.0, sinks=None):
    (B, H, T, D), (Hkv, S) = q.shape, k.shape[1:3]
    out, lse = torch.zeros(B, T, H, D, dtype=torch.double), torch.zeros(B, H, T, dtype=torch.double)
    for b, h in itertools.product(range(B), range(H)):
        g = h // (H // Hkv)
        keys = alive(k_slots, offset[b, g], len[b, g], k[b, g, first[b] :])
        values = alive(v_slots, offset[b, g], len[b, g], v[b, g, first[b] :])
        column = torch.arange(keys.shape[0]) - len[b, g] + first[b]  # of the chunk; stored slots lie before all
        stored = torch.arange(keys.shape[0]) < len[b, g]
        sees = stored | (column <= torch.arange(T)[:, None] + S - T)
        a, lse[b, h] = attention(q[b, h], keys, sees, scale, softcap, None if sinks is None else sinks[h])
        out[b, :, h] = a @ values.nan_to_num()
        out[b, :, h][sees.double() @ values.isnan().double() > 0] = float("nan")
    return out, lse


def score(
    q, row_first, k_slots, offset, len, k, first, stop, scale, softcap, *, causal, reduce, columns, lse=None, sinks=None
):
    (B, H, R, _), Hkv = q.shape, k.shape[1]
    G, out = H // Hkv, torch.zeros(B, Hkv, columns, dtype=torch.double)
    for b, h in itertools.product(range(B), range(H)):
        if row_first[b] == R:
            continue
        keys = alive(k_slots, offset[b, h // G], len[b, h // G], k[b, h // G, first[b] : stop[b]])
        n = keys.shape[0]
        sees = torch.ones(R, n, dtype=torch.bool).tril(n - R if causal else n)[row_first[b] :]
        given = None if lse is None else lse[b, h, row_first[b] :].double()
        a, _ = attention(
            q[b, h, row_first[b] :], keys, sees, scale, softcap, None if sinks is None else sinks[h], given
        )
        out[b, h // G, :n] += {"sum": a.sum(0), "mean": a.mean(0), "max": a.amax(0)}[reduce] / G
    return out


def select(score, n, keep, protect_first, protect_last, columns):
    index = torch.full((*n.shape, columns), -1, dtype=torch.int32)
    for b, h in itertools.product(range(n.shape[0]), range(n.shape[1])):
        count, head, tail = int(n[b, h]), int(protect_first[b]), int(n[b, h] - protect_last[b])
        rank = [(1, -s, i) if s == s else (2, 0.0, i) for i, s in enumerate(score[b, h, :count].tolist())]
        rank += [(2, 0.0, i) for i in range(score.shape[2], count)]
        best = sorted((0, 0.0, i) if i < head or i >= tail else r for i, r in enumerate(rank))[: int(keep[b, h])]
        index[b, h, : keep[b, h]] = torch.tensor(sorted(i for *_, i in best), dtype=torch.int32)
    return index


def compact(
    k_src, v_src, pos_src, src_offset, src_len, k, v, pos, first, index, keep, k_dst, v_dst, pos_dst, dst_offset
):
    """Writes k_dst, v_dst and pos_dst, as the op does."""
    for b, h in itertools.product(range(k.shape[0]), range(k.shape[1])):
        n, f, o = int(keep[b, h]), int(first[b]), int(dst_offset[b, h])
        chosen = torch.arange(n) if index is None else index[b, h, :n].long()
        for src, new, dst in ((k_src, k[b, h], k_dst), (v_src, v[b, h], v_dst), (pos_src, pos[b], pos_dst)):
            dst[o : o + n] = torch.cat([src[src_offset[b, h] :][: src_len[b, h]], new[f:]])[chosen]


def decode(q, k, v, pos, k_slots, v_slots, pos_slots, offset, len, scale, softcap=0.0, sinks=None, columns=0):
    """Writes k_slots, v_slots and pos_slots, as the op does."""
    B, Hkv = offset.shape
    probs, first = torch.zeros(B, Hkv, columns, dtype=torch.double), torch.zeros(B, dtype=torch.int32)
    out, lse = attend(q, k_slots, v_slots, offset, len, k, v, first, scale, softcap, sinks)
    for b, h in itertools.product(range(B), range(Hkv)):
        at = int(offset[b, h] + len[b, h])
        k_slots[at], v_slots[at], pos_slots[at] = k[b, h, 0], v[b, h, 0], pos[b, 0]
    if columns:
        none = torch.zeros(B, dtype=torch.int32)
        probs = score(
            q, none, k_slots, offset, len + 1, k[:, :, :0], none, none, scale, softcap,
            causal=False, reduce="sum", columns=columns, lse=lse,
        )  # fmt: skip
    return out, lse, probs


# METHODS section 0: GQA and pooling


def probs(q, k, scale, causal=True):
    """a [H, R, n]; causal: the rows are the last R slots' own."""
    (H, R, _), (Hkv, n, _) = q.shape, k.shape
    x = q.double() @ k.double().repeat_interleave(H // Hkv, 0).mT * scale
    if causal:
        x = x.masked_fill(torch.ones(R, n).tril(n - R) == 0, -INF)
    return x.softmax(-1)


def group_mean(x, kv_heads):
    return x.unflatten(0, (kv_heads, -1)).mean(1)


def pool(score, kind, kernel, protect_first=0, protect_last=0):
    """Stride 1, over the adjacent alive unprotected slots; a protected one keeps its score, nobody's neighbour."""
    end = score.shape[-1] - protect_last
    middle, result = score[..., protect_first:end].double(), score.double().clone()
    if middle.shape[-1]:
        padded = F.pad(middle, (kernel // 2, kernel // 2), value=-INF if kind == "max" else 0.0).unfold(-1, kernel, 1)
        result[..., protect_first:end] = padded.amax(-1) if kind == "max" else padded.sum(-1) / kernel
    return result


# METHODS section 1: scores of one layer


def h2o(q, k, scale, carried=0.0):
    return carried + group_mean(probs(q, k, scale).sum(1), k.shape[0])


def tova(q, k, scale):
    """One ranking for the layer: the last row, mean over all its query heads."""
    return probs(q[:, -1:], k, scale)[:, 0].mean(0).expand(k.shape[0], -1)


def snapkv(q, k, scale, window=32, kernel=7, sink=0):
    rows = min(window, q.shape[1])
    score = group_mean(probs(q[:, -rows:], k, scale).sum(1), k.shape[0])
    return pool(score, "max", kernel, sink, min(window, k.shape[1] - sink))


def knorm(k):
    return -k.double().norm(dim=-1)


def keydiff(k):
    return -F.cosine_similarity(k.double(), k.double().mean(1, keepdim=True), dim=-1)


# METHODS section 3: TAKE


def rotate(x, distance, inv_freq):
    """RoPE by `distance` in the half-split layout; dimensions past 2 * len(inv_freq) are not rotated."""
    half, angle = inv_freq.numel(), distance * inv_freq.double()
    a, b, rest = x.double().split([half, half, x.shape[-1] - 2 * half], -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), rest], -1)


def accumulated_probe(previous, q, alpha=0.2, moved=0, inv_freq=None):
    """Eq. 9. Literal without inv_freq; aligned with it: what was accumulated is rotated by the distance moved."""
    if previous is None:
        return q.double()
    previous = previous.double() if inv_freq is None else rotate(previous, moved, inv_freq)
    return alpha * previous + (1 - alpha) * q.double()


def take(probe, k, scale, kernel=7, protect_last=0):
    """Eq. 10-11: every alive slot is visible to the probe, whose own keys are not among k."""
    score = group_mean(probs(probe, k, scale, causal=False).mean(1), k.shape[0])
    return pool(score, "avg", kernel, 0, protect_last)


def warmup(tokens, budget):
    return max(budget, min(tokens, 10240, max(budget, math.ceil(tokens * 5 / 64))))


def chunks(tokens, size):
    """[begin, end) of each chunk; the remainder goes first."""
    begin = tokens % size
    starts = ([0] if begin else []) + list(range(begin, tokens, size))
    return list(zip(starts, [*starts[1:], tokens], strict=True))
