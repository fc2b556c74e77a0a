"""Scores for long answers (METHODS section 10) in float64: TriAttention (2604.04921) and R-KV (2505.24133). The part of
`oracle.Row` for them."""

import torch

SCORES = dict(tri=dict(sink=4), rkv=dict(kernel=7, pool="max"))
ROWS = dict(tri="none")


def halves(row, x):
    """Complex halves [.., F] of x [.., d], which rotation turns, and the dimensions that it does not."""
    angles = len(row.angles(1))
    real, imaginary, rest = x.split([angles, angles, x.shape[-1] - 2 * angles], -1)
    return torch.complex(real, imaginary), rest


def tri(row, seen, g, end):
    """Every query ever read, before rotation; the frequencies' phases after the last row, at D = 1, 2, 4 .. 65536."""
    layer, slots = seen.layer, seen.layer.alive[g]
    keys, flat = halves(row, layer.k[g, slots])
    width = layer.k.shape[2]
    queries = torch.stack(layer.queries) if layer.queries else torch.zeros(1, len(seen.q), width).double()
    inside, best = slice(end[0], len(slots) - end[1]), None
    for h in range(g * row.group, (g + 1) * row.group):
        q, straight = halves(row, queries[:, h])
        mean, size = q.mean(0), q.abs().mean(0)
        score = (straight.mean(0) * flat).sum(1)
        score = score + ((straight.abs().mean(0) - straight.mean(0).abs()) * flat.abs()).sum(1)
        for n in range(17):
            phase = row.angles(row.chunk_end - 1 + 2**n) + mean.angle() - keys.angle()
            score = score + (mean.abs() * keys.abs() * phase.cos()).sum(1) / 17
        score = score + ((size - mean.abs()) * keys.abs()).sum(1)
        competing = score[inside]
        if len(competing):
            score = (score - competing.mean()) / competing.std(correction=0).clamp(min=1e-6)
        best = score if best is None else torch.maximum(best, score)
    return best.tolist()


def rkv(row, seen, g, end):
    o, slots, mine = row.o, seen.layer.alive[g], slice(g * row.group, (g + 1) * row.group)
    keys, stop = seen.layer.k[g, slots], len(slots) - end[1]
    if row.reading:
        q = seen.q[:, max(0, seen.new - o["window"]) : seen.new]
    else:
        q = torch.stack([each[1] for each in seen.layer.asked[-o["window"] :]], 1)
    logits = torch.stack([q[h] @ keys[:stop].T * seen.logit[0] for h in range(*mine.indices(len(q)))])
    importance = logits.amax(0).softmax(-1).mean(0)
    half = o["kernel"] // 2
    unit = keys / keys.norm(dim=1, keepdim=True)
    total = torch.zeros(len(slots), dtype=torch.double)
    for i in range(len(slots)):
        cosine = unit @ unit[i]
        cosine[i] = 0
        copies = [j for j in range(len(slots)) if cosine[j] > 0.5]
        if copies:
            cosine[copies[-1]] = 0
        total += cosine / len(slots)
    redundancy, scores = total.softmax(0), []
    for i in range(len(slots)):
        near = importance[max(end[0], i - half) : min(stop, i + half + 1)]
        most = near.max().item() if end[0] <= i < stop else 0.0
        scores.append(0.1 * most - 0.9 * redundancy[i].item())
    return scores
