"""Scores of keys, values and projected values (METHODS section 9) in float64: LagKV, Compactor, DefensiveKV and the
refinement CriticalKV. The part of `oracle.Row` for them."""

import math

import oracle
import torch
from oracle_rows import observers

SCORES = {
    "lagkv": dict(lag=128, sink=4),
    "compactor": dict(sink=8, recent=4),
    "defensive": dict(kernel=5),
}
ROWS = dict(lagkv="none", compactor="all")
CARRIED = ("lagkv", "compactor")
SKETCH, BLOCK = 48, 256  # columns of Compactor's sketch of keys (seed 0), and tokens of a block
COVER = 0.9  # share of all attention on the slots that come first under DefensiveKV
SURE = 1e-6  # of a sum of attention weights; float32 may round it by 1e-7


def protected(row_end, o):
    """The last slots that LagKV and Compactor keep; row_end: tokens seen, None: the most that they ever keep."""
    if o["score"] == "compactor":
        return o["recent"]
    return o["lag"] + (o["lag"] - 1 if row_end is None else (row_end - o["sink"]) % o["lag"])


def output_norm(row, seen, g, slots):
    """[n] mean over the group of |W_O,h v|_1."""
    weight, v, norms = row.model.model.layers[seen.index].self_attn.o_proj.weight, seen.layer.v[g, slots], 0
    d, group = v.shape[1], weight.shape[1] // v.shape[1] // len(seen.layer.alive)
    for head in range(g * group, (g + 1) * group):
        norms = norms + (v @ weight[:, head * d : (head + 1) * d].T).abs().sum(1) / group
    return norms


def lag(row, seen, g, end):
    """By tokens of the text, cut or not: every part that its successor follows has numbers."""
    o, layer, size, found = row.o, seen.layer, row.o["lag"], {}
    starts, near = range(o["sink"], layer.k.shape[1] - 2 * size + 1, size), range(size - 1)
    if o["chunk_size"] is None and starts:  # cut once: only ranks at the cut of a part matter
        kept = max(row.B - o["sink"] - protected(row.chunk_end, o), 0)
        near = [size - 1 - i for i in {kept // len(starts), -(-kept // len(starts))} if 0 < i < size]
    for start in starts:
        both = 0
        for x in (layer.k[g], layer.v[g]):
            part, after = x[start : start + size], x[start + size : start + 2 * size]
            scaled = (part - after.min(0).values) / (after.max(0).values - after.min(0).values)
            both = both + scaled.std(1).softmax(0) / 2
        order = both.sort().values
        if row.near and any(order[i + 1] - order[i] < row.near * order[i] for i in near):
            raise oracle.NearTie(math.nan)
        found |= {start + i: (both < x).sum().item() / size for i, x in enumerate(both)}
    return [found.get(t, math.inf) for t in layer.alive[g]]


def standard(x, counted):
    part = x[:, :counted]
    return (x - part.mean()) / max(part.std().item(), 1e-6) if part.numel() > 1 else 0 * x


def note_compactor(row, seen):
    """A chunk's tokens get their numbers, and so do those that were decoded before it."""
    o, layer = row.o, seen.layer
    decoded = [t for t in layer.alive[0] if t < row.seen and t not in layer.carry[0]]
    new = range(max(row.seen, o["sink"]), row.chunk_end)
    tokens, heads = [*decoded, *new], range(len(layer.alive))
    counted = max(len(tokens) - o["recent"] * row.last, 0)
    for carry in layer.carry:
        carry |= dict.fromkeys(range(row.seen, min(o["sink"], row.chunk_end)), 0.0)
    if not tokens:
        return
    numbers = 0.35 * standard(_leverage(row, seen, tokens, counted), counted)
    if new:
        column_sums, inside = _both_ways(row, seen, new, counted - len(decoded))
        numbers[:, len(decoded) :] += standard(column_sums, inside)
    for g in heads:
        layer.carry[g] |= dict(zip(tokens, numbers[g].tolist()))


def _leverage(row, seen, tokens, counted):
    """[Hkv, L]: x G^-1 x' with the Gram matrix of the counted ones."""
    d = seen.layer.k.shape[-1]
    phi = torch.randn(d, SKETCH, generator=torch.Generator().manual_seed(0)).double() / SKETCH**0.5
    found = []
    for k in seen.layer.k:
        x = torch.stack([row.turn(k[t], -t) for t in tokens])
        mean = x[:counted].mean(0) if counted else 0
        x = (x - mean) @ phi
        gram = x[:counted].T @ x[:counted] + 0.01 * torch.eye(SKETCH)
        found.append(torch.stack([y @ torch.linalg.inv(gram) @ y for y in x]))
    return torch.stack(found)


def _both_ways(row, seen, new, counted):
    """([Hkv, n], how many set the scale): the last tokens of a prompt are a block and pooled by themselves."""
    size, start, counted, found = BLOCK, new[0] - row.seen, max(counted, 0), []
    blocks = [list(range(i, min(i + size, counted))) for i in range(0, counted, size)]
    blocks += [list(range(counted, len(new)))] if counted < len(new) else []
    for g, (k, v) in enumerate(zip(seen.layer.k[:, new], seen.layer.v[:, new])):
        column = torch.zeros(len(new), dtype=torch.double)
        for q in seen.q[g * row.group : (g + 1) * row.group, start : start + len(new)]:
            for block in blocks:
                column[block] += (q[block] @ k[block].T).softmax(1).sum(0) / row.group
        score = [0.0, *(column * v.norm(dim=1)).tolist(), 0.0]
        ends = {0, counted, len(new)}  # nothing is averaged over these
        near = [(score[i + 1] + (i not in ends) * score[i] + (i + 1 not in ends) * score[i + 2]) / 3
                for i in range(len(new))]  # fmt: skip
        found.append(torch.tensor(near, dtype=torch.double))
    return torch.stack(found), counted


def defensive(row, seen, g, end):
    """Logarithms, since the first slots' scores and the others' differ in size."""
    o, (first, last) = row.o, end
    a, _ = observers(row, seen, g)
    n, mean = a.shape[-1], a.mean((0, 1))
    inside = range(first, n - last)
    x, half = a[..., first : n - last], o["kernel"] // 2
    near = torch.stack([x[..., max(0, i - half) : i + half + 1].sum(-1) for i in range(len(inside))], -1) / o["kernel"]
    worst = (near * (x.sum(-1) / near.sum(-1))[..., None]).nan_to_num(0).amax((0, 1)) if len(inside) else x[0, 0]
    norm = output_norm(row, seen, g, seen.layer.alive[g])[first : n - last]
    score = worst.clamp(min=worst.mean()) * norm / norm.sum() if len(inside) else worst
    wanted = COVER * mean.sum() - mean[:first].sum() - mean[n - last :].sum()
    found, covered = [0.0] * n, 0.0
    for i, x in enumerate(score.clamp(min=1e-300).log().tolist()):
        found[first + i] = x
    for i in sorted(inside, key=lambda i: -mean[i]):
        if row.near and abs(covered - wanted) < SURE:
            raise oracle.NearTie(math.nan)
        if covered < wanted and mean[i] > 0:
            found[i] = 50 + mean[i].log().item()
        covered += mean[i]
    return found


def taken(row, seen, g, items, wanted, kept):
    """(kept, lost) of a head's items, as `Row.best`; kept: its protected slots. Half by score, the others by score
    times the norm."""
    if row.o["refine"] != "critical":
        return row.best(items, wanted)
    first, rest = row.best(items, max(0, (wanted + kept) // 2 - kept))
    norm = output_norm(row, seen, g, seen.layer.alive[g])
    rest = [(-(-x[0] + 1e-4) * norm[x[-1]].item(), *x[1:]) for x in rest]
    more, lost = row.best(rest, wanted - len(first))
    return first + more, lost
