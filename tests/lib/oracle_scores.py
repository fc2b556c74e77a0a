"""Scores that read values and outputs, and the output errors over any score (METHODS sections 1, 2 and 4), in float64.

The part of `oracle.Row` for them. Of one kv head: a [G, R, n] the observing rows' attention, tokens the R rows' own, o
[G, R, d] the outputs that they had when they ran, v [n, d] the alive slots' values.
"""

import torch
from ref import caote

DEFAULTS = dict(error="none", rows="pooled", squared=False, protect=True, gamma=200.0, measure=False)
_EDIE = dict(score="edie", window=32, kernel=7, pool="max", weight="middle", alpha=0.1, heads="flat")
_CAKE = dict(score="cake", window=32, kernel=5, pool="avg", layers="cake")
_VATP = dict(score="vatp", base="h2o", sink=20, recent=None, window=32)
PRESETS = {
    "cake": _CAKE,
    "edie": _EDIE,
    "edie-exact": _EDIE | dict(score="edie-exact"),
    "vatp": _VATP,
    "paasvn": _VATP | dict(base="snapkv", sink=0),
}
SCORES = ("edie", "edie-exact", "vatp", "cake")


def add_presets(presets):
    """CAOTE's: over a base, in blocks of 128 tokens, one slot a decoded token."""
    presets |= PRESETS
    for error in ("caote", "fastcaote"):
        for base in ("h2o", "tova", "snapkv"):
            own = dict(error=error, schedule="chunk", chunk_size=128, decode=True, interval=1)
            presets[f"{base}+{error}"] = presets[base] | own | ({"per_head": True} if base == "tova" else {})
    presets["take+caote"] = presets["take"] | dict(error="caote")


def carries(o):
    return o["score"] == "h2o" or (o["score"] == "vatp" and o["base"] == "h2o")


def ends(o, share):
    """Slots kept at either end; `share` is half of a head's budget."""
    if o["score"] != "vatp":
        return 0, o["window"]
    return o["sink"], o["window"] if o["base"] == "snapkv" else share if o["recent"] is None else o["recent"]


def always(o):
    """Slots that a head keeps at any budget; half of one holds VATP's sinks, so that the other can be recent."""
    return sum(ends(o, o.get("sink")))


def scores(row, layer, q, attention):
    """Per kv head the scores of the alive slots, not pooled."""
    o, result = row.o, []
    for g, slots in enumerate(layer.alive):
        v = layer.v[g, slots]
        if carries(o):
            result.append(torch.tensor([layer.carry[g][t] for t in slots], dtype=torch.double) * v.abs().sum(1))
            continue
        a, tokens, out = _rows(row, layer, q, attention, g, o["window"])
        if o["score"] == "vatp":
            result.append(a.sum(1).mean(0) * v.abs().sum(1))
        elif o["score"] == "cake":
            variance = a.var(1, correction=1) if len(tokens) > 1 else 0.0
            result.append((a.mean(1) + o["gamma"] * variance).mean(0))
        else:
            size = (v - out[:, :, None]).abs().sum(-1)  # of v_i - o_j
            term = a / (1 - a).clamp(min=1e-6) * size
            if o["score"] == "edie":
                size = v.abs().sum(-1) + out.abs().sum(-1, keepdim=True)
                term = a / (1 + o["alpha"] - a) * size
            result.append((_row_weights(a, slots, tokens, o["weight"])[..., None] * term).sum((0, 1)))
    return [x.tolist() for x in result]


def _rows(row, layer, q, attention, g, count):
    """(a, tokens, o) of the last `count` rows: this read's, or the decoded ones, whose attention is taken over what is
    alive now."""
    if row.reading:
        new = q.shape[1] - row.extra
        rows = range(max(0, new - count), new)
        return attention[g][:, rows], [row.seen + r for r in rows], row.out[g][:, rows]
    tokens, queries, outs = zip(*layer.asked[-count:])
    slots, mine = layer.alive[g], slice(g * row.group, (g + 1) * row.group)
    a = row._weights(g, torch.stack(queries, 1), tokens, layer.k[g, slots], slots)
    return a, list(tokens), torch.stack(outs, 1)[mine]


def _row_weights(a, slots, tokens, weight):
    """c_j [G, R], EDIE eq. 10."""
    w, T = len(tokens), tokens[-1] + 1
    low = w if weight in ("middle", "i>w") else 0
    high = T - 2 * w if weight in ("middle", "i<=t-2w") else T
    inside = [i for i, t in enumerate(slots) if low <= t < high] or [i for i, t in enumerate(slots) if t < T - w]
    return a[:, :, inside].amax(-1) if inside and weight != "none" else torch.ones(a.shape[:2], dtype=torch.double)


def refined(row, layer, q, attention, scores):
    """What is ranked: `scores` or, of each kv head, what CAOTE makes of them."""
    o = row.o
    if o["error"] == "none":
        return scores
    result = []
    for g, slots in enumerate(layer.alive):
        v = layer.v[g, slots]
        if o["rows"] == "each":
            a, _, out = _rows(row, layer, q, attention, g, o["window"] if o["score"] != "tova" else 1)
            term = a / (1 - a).clamp(min=1e-6) * (v - out[:, :, None]).norm(dim=-1)
            result.append(term.sum(1).mean(0).tolist())
        else:
            h = torch.tensor(scores[g], dtype=torch.double)
            result.append(caote(h, v, o["error"] == "fastcaote", o["squared"]).tolist())
    return result


def layer_error(row, layer, q, attention, ends):
    """TADA's E_int: what is ranked, unpooled, summed over heads and slots that are not protected."""
    chosen, row.o = row.o, row.o | dict(pool="none")
    ranked = refined(row, layer, q, attention, row._scores(layer, q, attention, ends))
    row.o = chosen
    return sum(sum(x[first : len(x) - last]) for x, (first, last) in zip(ranked, ends))
