"""Every op of csrc/kvevict.h in a few lines of float64 torch, independent of csrc and of the package, with arguments
as in kvevict/ops/_ops.py."""

import itertools
import math
from dataclasses import replace

import torch

INF = float("inf")


# METHODS section 11: rows of 8 and 4 bits. Kinds are numbered as kv_kind of csrc/kvevict.h.
INT8, INT4 = 1, 2


def hadamard(d):
    """[d, d] orthonormal: the matrix of the largest power of two that divides d, block by block."""
    one = torch.ones(1, 1, dtype=torch.double)
    while d % (2 * len(one)) == 0:
        one = torch.cat([torch.cat([one, one], 1), torch.cat([one, -one], 1)]) * 0.5**0.5
    return torch.block_diag(*[one] * (d // len(one)))


def packed(x, kind, centre=0.0):
    """Rows x [n, d] as the bytes that are stored."""
    x = x.double() - centre
    if kind == INT8:
        scale = (x.abs().amax(1, keepdim=True) / 127).float()
        number = (x / scale.double().where(scale > 0, 1.0)).round().nan_to_num().clamp(-127, 127).to(torch.int8)
        ends = scale.where(x.isfinite().all(1, keepdim=True), math.nan)
    else:
        x = x @ hadamard(x.shape[1])
        least = x.amin(1, keepdim=True).half()
        scale = ((x.amax(1, keepdim=True) - least.double()) / 15).clamp(min=0).half()
        number = ((x - least.double()) / scale.double().where(scale > 0, 1.0)).round().nan_to_num().clamp(0, 15)
        low, high = number.to(torch.uint8).chunk(2, 1)
        number = low | high << 4
        none = ~(x.isfinite().all(1, keepdim=True) & least.isfinite() & scale.isfinite())
        ends = torch.cat([scale.masked_fill(none, math.nan), least.masked_fill(none, 0.0)], 1)
    return torch.cat([number.view(torch.uint8), ends.flatten().view(torch.uint8).view(len(x), 4)], 1)


def unpacked(rows, d, kind, centre=0.0):
    """The numbers [n, d] that stored bytes stand for."""
    if kind == INT8:
        x = rows[:, :d].clone().view(torch.int8).double() * rows[:, d:].clone().view(torch.float32).double()
    else:
        number = torch.cat([rows[:, : d // 2] & 15, rows[:, : d // 2] >> 4], 1).double()
        scale, least = rows[:, d // 2 :].clone().view(torch.float16).double().split(1, 1)
        x = (number * scale + least) @ hadamard(d)
    return x + centre


def alive(held, name, b, h, new):
    """Keys ("k") or values ("v") of one head's alive slots [stored | new]."""
    offset = held.offset[b, h]
    stored, kind = getattr(held, name)[offset : offset + held.len[b, h]], getattr(held, f"{name}_kind")
    if kind:
        centred = name == "k" and held.centre is not None
        stored = unpacked(stored, new.shape[1], kind, held.centre[b, h].double() if centred else 0.0)
    return torch.cat([stored.double(), new.double()])


def attention(q, keys, sees, scale, softcap=0.0, sinks=None, lse=None):
    """a [R, n], lse [R] of one head's rows, the sink's share included; unseen slots have no part in it, NaN or not."""
    x = q.double() @ keys.T * scale
    x = softcap * torch.tanh(x / softcap) if softcap > 0 else x
    x = x.masked_fill(~sees, -INF)
    if lse is None:
        sink = x.new_full((1,), -INF) if sinks is None else sinks.double()
        lse = torch.logsumexp(torch.cat([x, sink.expand(x.shape[0], 1)], 1), 1)
    return (x - lse[:, None]).exp().masked_fill(~sees, 0.0), lse


def attend(q, held, k, v, first, scale, softcap=0.0, sinks=None, stop=None, *, size=False):
    """size: of the terms, the sum of their absolute values."""
    (B, H, T, D), (Hkv, S) = q.shape, k.shape[1:3]
    out, lse = torch.zeros(B, T, H, D, dtype=torch.double), torch.zeros(B, H, T, dtype=torch.double)
    for b, h in itertools.product(range(B), range(H)):
        g = h // (H // Hkv)
        new = slice(int(first[b]), S if stop is None else int(stop[b]))
        keys = alive(held, "k", b, g, k[b, g, new])
        values = alive(held, "v", b, g, v[b, g, new])
        column = torch.arange(keys.shape[0]) - held.len[b, g] + first[b]  # of the chunk; stored slots lie before all
        stored = torch.arange(keys.shape[0]) < held.len[b, g]
        sees = stored | (column <= torch.arange(T)[:, None] + S - T) | (stop is not None)
        a, lse[b, h] = attention(q[b, h], keys, sees, scale, softcap, None if sinks is None else sinks[h])
        out[b, :, h] = a @ (values.abs() if size else values).nan_to_num()
        out[b, :, h][sees.double() @ values.isnan().double() > 0] = float("nan")
    return out, lse


def observed(q, row_first, held, k, first, stop, scale, softcap, causal, lse, sinks):
    """b, h, a [rows, n], sees [rows, n] of every query head, for the rows that observe."""
    (B, H, R, _), Hkv = q.shape, k.shape[1]
    for b, h in itertools.product(range(B), range(H)):
        g = h // (H // Hkv)
        keys = alive(held, "k", b, g, k[b, g, first[b] : stop[b]])
        n, rows = keys.shape[0], slice(int(row_first[b]), R)
        sees = torch.ones(R, n, dtype=torch.bool).tril(n - R if causal else n)[rows]
        given = None if lse is None else lse[b, h, rows].double()
        if given is not None:
            sees = sees & (given != -INF)[:, None]
        sink = None if sinks is None else sinks[h]
        yield b, h, attention(q[b, h, rows], keys, sees, scale, softcap, sink, given)[0], sees


def grouped(x, kv_heads, how):
    """[B, H, C] -> [B, Hkv, C], [B, H, C] if how is "none"."""
    x = x.unflatten(1, (kv_heads, -1))
    return {"sum": x.sum(2), "mean": x.mean(2), "max": x.amax(2), "none": x.flatten(1, 2)}[how]


def kl(q, k, target, row_first, held, first, stop, sinks=None, *, scale, softcap=0.0, causal=True):
    """LookaheadKV eq. 5, the attention materialised, so that autograd finds the gradient."""
    losses = []
    clean = torch.where(k.isnan(), torch.zeros_like(k), k)  # padding, which 0 times it would not leave out
    seen = observed(q, row_first, held, clean, first, stop, scale, softcap, causal, None, sinks)
    for b, h, a, _ in seen:
        p = a.mean(0)[: target.shape[2]] if a.shape[0] else a.new_zeros(0)
        t = target[b, h, : p.shape[0]].double()
        if not (t.sum() > 0 and p.sum() > 0):
            losses.append(0 * (q.double().sum() + clean.double().sum()))
            continue
        t = t / t.sum()
        own = t > 0
        losses.append((t[own] * (t[own] / (p[own].clamp_min(1e-30) / p.sum())).log()).sum())
    return torch.stack(losses).mean()


def score(
    q, row_first, held, k, first, stop, scale, softcap, *, causal, reduce, columns, lse=None,
    sinks=None, weight=None, term="a", group="mean",
):  # fmt: skip
    out = torch.zeros(*q.shape[:2], columns, dtype=torch.double)
    for b, h, a, sees in observed(q, row_first, held, k, first, stop, scale, softcap, causal, lse, sinks):
        if a.shape[0] == 0:
            continue
        a = {"a": a, "square": a**2, "entropy": -torch.special.xlogy(a, a)}[term]
        if weight is not None:
            a = (weight[b, h, row_first[b] :, None].double() * a).masked_fill(~sees, 0.0)
        out[b, h, : a.shape[1]] = {"sum": a.sum(0), "mean": a.mean(0), "max": a.amax(0)}[reduce]
    return grouped(out, k.shape[1], group)


def peak(q, row_first, held, k, first, stop, lo, hi, scale, softcap, *, causal, lse=None, sinks=None):
    out = torch.zeros(q.shape[:3], dtype=torch.double)
    for b, h, a, _ in observed(q, row_first, held, k, first, stop, scale, softcap, causal, lse, sinks):
        g = h // (q.shape[1] // k.shape[1])
        if lo[b, g] < hi[b, g]:
            out[b, h, row_first[b] :] = a[:, lo[b, g] : hi[b, g]].amax(1)
    return out


def error(
    q, row_first, held, k, v, first, stop, o, scale, softcap, *, causal, kind, columns,
    alpha=0.0, lse=None, sinks=None, weight=None, group="sum", power=1,
):  # fmt: skip
    """METHODS section 1 (EDIE eq. 7, 9-11) and 2 (CAOTE eq. 6), one row at a time. power=2: instead of each term's a /
    (1 - a) its slope a / (1 - a)^2, the change by a relative error of a."""
    out = torch.zeros(*q.shape[:2], columns, dtype=torch.double)
    for b, h, a, sees in observed(q, row_first, held, k, first, stop, scale, softcap, causal, lse, sinks):
        g, n = h // (q.shape[1] // k.shape[1]), a.shape[1]
        values = alive(held, "v", b, g, v[b, g, first[b] : stop[b]])
        for r in range(a.shape[0]):
            at = int(row_first[b]) + r
            output = o[b, at, h].double()
            if kind == "edie":
                term = a[r] / (1 + alpha - a[r]).clamp(min=1e-6) ** power * (values.abs().sum(1) + output.abs().sum())
            else:
                term = a[r] / (1 - a[r]).clamp(min=1e-6) ** power * (values - output).norm(p=int(kind[1]), dim=1)
            term = term if weight is None else weight[b, h, at].double() * term
            out[b, h, :n] += term.masked_fill(~sees[r], 0.0)
    return grouped(out, k.shape[1], group)


def last_rows(q, held, k, v, first, scale, softcap, sinks, observers, span=-1):
    """What `attend` computes, and its last rows' q, lse and out as `observed` reads them. span >= 0 (KVzip, section
    3.2): their lse is over the head's first stored slots and the new columns alone."""
    out, lse = attend(q, held, k, v, first, scale, softcap, sinks)
    start = q.shape[2] - observers
    own = lse[:, :, start:]
    if span >= 0:
        few = replace(held, len=held.len.clamp_max(span))
        own = attend(q[:, :, start:], few, k, v, first, scale, softcap, sinks)[1]
    return out, lse, dict(q=q[:, :, start:], lse=own), out[:, start:]


def attend_score(
    q, held, k, v, first, row_first, stop, scale, softcap, *, observers, causal, reduce, columns, sinks=None,
    weight=None, term="a", group="mean", span=-1,
):  # fmt: skip
    out, lse, rows, _ = last_rows(q, held, k, v, first, scale, softcap, sinks, observers, span)
    rows |= dict(row_first=row_first, held=held, k=k, first=first, stop=stop, scale=scale, softcap=softcap)
    how = dict(causal=causal, reduce=reduce, columns=columns, weight=weight, term=term, group=group)
    return out, lse, score(**rows, **how)


def attend_error(
    q, held, k, v, first, row_first, stop, scale, softcap, *, observers, causal, kind, columns, sinks=None, weight=None,
    alpha=0.0, group="sum",
):  # fmt: skip
    out, lse, rows, o = last_rows(q, held, k, v, first, scale, softcap, sinks, observers)
    rows |= dict(row_first=row_first, held=held, k=k, v=v, first=first, stop=stop, scale=scale, softcap=softcap, o=o)
    how = dict(causal=causal, kind=kind, columns=columns, weight=weight, alpha=alpha, group=group)
    return out, lse, error(**rows, **how)


def attend_peak(q, held, k, v, first, row_first, stop, lo, hi, scale, softcap, *, observers, causal, sinks=None):
    out, lse, rows, _ = last_rows(q, held, k, v, first, scale, softcap, sinks, observers)
    rows |= dict(row_first=row_first, held=held, k=k, first=first, stop=stop, scale=scale, softcap=softcap)
    return out, lse, peak(**rows, lo=lo, hi=hi, causal=causal)


def probe(q, past, decay, cos=None, sin=None, partner=None):
    """TAKE eq. 9, the past rotated to the positions of q."""
    past, decay = past.double(), decay.double()[:, None, None, None]
    if cos is not None:
        past = past * cos.double()[:, None, None] + past[..., partner.long()] * sin.double()[:, None, None]
    return decay * past + (1 - decay) * q.double()


def refine(held, v, first, stop, score, fast=False, squared=False):
    """METHODS section 2, CAOTE eq. 6-8."""
    out = torch.zeros(score.shape, dtype=torch.double)
    for b, h in itertools.product(range(score.shape[0]), range(score.shape[1])):
        values = alive(held, "v", b, h, v[b, h, first[b] : stop[b]])
        n = values.shape[0]
        if n:
            out[b, h, :n] = caote(score[b, h, :n], values, fast, squared)
    return out


def norm(held, x, first, stop, p, columns):
    out = torch.zeros(*x.shape[:2], columns, dtype=torch.double)
    for b, h in itertools.product(range(x.shape[0]), range(x.shape[1])):
        each = alive(held, "k", b, h, x[b, h, first[b] : stop[b]]).norm(p=p, dim=1)
        out[b, h, : each.shape[0]] = each
    return out


def linear(x, weight, bias=None, *, size=False):
    """size: of the terms, the sum of their absolute values."""
    x, weight, bias = (None if t is None else t.double().abs() if size else t.double() for t in (x, weight, bias))
    return torch.einsum("btk,nk->btn", x, weight) + (0 if bias is None else bias)


def quadratic(held, x, first, stop, matrix, linear=None, *, columns, size=False):
    """size: of the terms, the sum of their absolute values."""
    out = torch.zeros(*matrix.shape[:2], columns, dtype=torch.double)
    for b, h in itertools.product(range(matrix.shape[0]), range(matrix.shape[1])):
        g, A = h // (matrix.shape[1] // x.shape[1]), matrix[b, h].double()
        each = alive(held, "k", b, g, x[b, g, first[b] : stop[b]])
        by = torch.zeros(A.shape[0], dtype=torch.double) if linear is None else linear[b, h].double()
        each, A, by = (t.abs() for t in (each, A, by)) if size else (each, A, by)
        out[b, h, : each.shape[0]] = (each * (each @ A.T + by)).sum(1)
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


def compact(src, k, v, pos, first, index, keep, dst):
    """Writes dst.k, dst.v and dst.pos, as the op does."""
    for b, h in itertools.product(range(k.shape[0]), range(k.shape[1])):
        n, f, o = int(keep[b, h]), int(first[b]), int(dst.offset[b, h])
        chosen = torch.arange(n) if index is None else index[b, h, :n].long()
        for old, new, to in ((src.k, k[b, h], dst.k), (src.v, v[b, h], dst.v), (src.pos, pos[b], dst.pos)):
            to[o : o + n] = torch.cat([old[src.offset[b, h] :][: src.len[b, h]], new[f:]])[chosen]


def decode(q, k, v, pos, held, scale, softcap=0.0, sinks=None, columns=0):
    """Writes held.k, held.v and held.pos, as the op does."""
    B, Hkv = held.len.shape
    probs, first = torch.zeros(B, Hkv, columns, dtype=torch.double), torch.zeros(B, dtype=torch.int32)
    out, lse = attend(q, held, k, v, first, scale, softcap, sinks)
    for b, h in itertools.product(range(B), range(Hkv)):
        at = int(held.offset[b, h] + held.len[b, h])
        held.k[at], held.v[at], held.pos[at] = k[b, h, 0], v[b, h, 0], pos[b, 0]
    if columns:
        none = torch.zeros(B, dtype=torch.int32)
        probs = score(
            q, none, replace(held, len=held.len + 1), k[:, :, :0], none, none, scale, softcap,
            causal=False, reduce="sum", columns=columns, lse=lse,
        )  # fmt: skip
    return out, lse, probs


# METHODS section 2: errors, of one head


def caote(h, v, fast=False, squared=False):
    """h [n] >= 0, v [n, d] -> c [n]; a slot with all of the mass gets the largest number (the formula would give 0)."""
    h, v = h.double(), v.double()
    hn = h / h.sum() if h.sum() != 0 else torch.full_like(h, 1 / h.numel())
    mean = v.mean(0) if fast else hn @ v
    distance = (v - mean).norm(dim=1)
    c = hn / (1 - hn) * (distance**2 if squared else distance)
    return torch.where(hn > 1 - 1e-6, torch.finfo(torch.float32).max, c)


def removal(a, v, norm):
    """How far the output a @ v moves when slot i alone is removed and the rest renormalised: [n], brute force."""
    moved = []
    for i in range(a.numel()):
        rest = a.clone()
        rest[i] = 0
        moved.append(((rest / rest.sum()) @ v - a @ v).norm(p=norm))
    return torch.stack(moved)
