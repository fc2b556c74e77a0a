"""Scores, and CAOTE's refinement of them (METHODS sections 1, 2 and 4), in float64: the part of `oracle.Row` for them.

They do not depend on the choice of rows: for one kv head they get a [G, R, n], the attention weights of R rows, and out
[G, R, d], the rows' outputs; v [n, d] are the alive slots' values.
"""

from functools import partial

import oracle_answers
import oracle_expected
import oracle_gates
import oracle_values
import torch
from oracle_rows import before, kept_between, observers
from ref import caote

DEFAULTS = dict(refine="none", squared=False, measure=False, cd="off")
_POOLED = dict(kernel=7, pool="max")
_ATTENTION = _POOLED | dict(reduce="sum", group="mean")
_EDIE = _POOLED | dict(weight="middle", alpha=0.1)
SCORES = {
    "streaming": dict(sink=4),
    "knorm": {},
    "keydiff": dict(unit=False),
    "h2o": dict(recent=None),
    "vatp": dict(recent=None, sink=20),
    "tova": dict(per_head=False),
    "snapkv": _ATTENTION,
    "fastkv": _ATTENTION | dict(group="sum"),
    "paasvn": _ATTENTION,
    "take": _ATTENTION | dict(reduce="mean", pool="avg", per_query=False),
    "products": dict(kernel=7, pool="none"),
    "oracle": _ATTENTION | dict(reduce="mean"),
    "laq": _ATTENTION,
    "speckv": _ATTENTION | dict(reduce="max", group="max"),
    "cake": _POOLED | dict(kernel=5, pool="avg"),
    "kvzip": dict(sink=4, carry="keep"),
    "kvzip+": dict(sink=4, carry="keep"),
    "expected": dict(sink=4),
    "gate": dict(gates=None, sink=4, recent=64, carry="keep"),
    "edie": _EDIE,
    "edie-exact": _EDIE,
} | oracle_values.SCORES
SCORES |= oracle_answers.SCORES
ROWS = dict(  # each method's default
    streaming="none", knorm="none", keydiff="none", h2o="all", vatp="all", tova="last", take="probe", oracle="given",
    laq="drafted", speckv="drafted", kvzip="repeat", expected="none", gate="none", **{"kvzip+": "repeat"},
    **oracle_values.ROWS, **oracle_answers.ROWS,
)  # fmt: skip
OWN_ROWS = dict(fastkv=dict(window=8), speckv=dict(draft_model=None), rkv=dict(window=8))


def carries(o):
    return o["score"] in ("h2o", "vatp")


def protected(o, share, end=None):
    """(first, last) slots that the score keeps; share: half of a head's budget; end: tokens seen, None: the most."""
    first = max(o["keep_first"], o.get("sink", 0))
    if o["score"] in oracle_values.CARRIED:
        return first, oracle_values.protected(end, o)
    recent = o.get("recent", 0) if carries(o) or o["score"] == "gate" else 0
    return first, share if recent is None else recent


def grow_carry(row, seen):
    """Add the attention of a chunk's rows, or of a decoded row, to the slots' sums: mean over the group."""
    if row.o["score"] in ("expected", "tri") and row.reading:
        oracle_expected.note(row, seen)
    if row.o["score"] == "compactor" and row.reading:
        oracle_values.note_compactor(row, seen)
    if row.o["score"] == "gate":
        oracle_gates.note(row, seen)
    if row.o["score"] in ("kvzip", "kvzip+") and row.reading:
        if row.part is not None:
            _part_numbers(row, seen)
        elif row.o["schedule"] == "chunk":
            _keep_numbers(row, seen)
    if not carries(row.o):
        return
    for g, (slots, carry) in enumerate(zip(seen.layer.alive, seen.layer.carry)):
        a = observers(row, seen, g)[0] if row.reading else seen.attention[g]
        for slot, x in zip(slots, a.sum(1).mean(0).tolist()):
            carry[slot] = carry.get(slot, 0.0) + x


def _keep_numbers(row, seen):
    """A slot has the number that it first got, or as `carry` says. Attention over the first `sink` slots, the chunk and
    the repetition: all of a row's attention less its attention to the other slots, with the model's sink."""
    o = row.o
    for g, (slots, carry) in enumerate(zip(seen.layer.alive, seen.layer.carry)):
        a, _ = observers(row, seen, g)
        others = a[:, :, o["sink"] : len(slots) - seen.new].sum(-1, keepdim=True)
        a = a / (1 - others)
        a = _weighed(row, seen, g, slots, a)
        _join(o, carry, dict(zip(slots, a.amax((0, 1)).tolist())))


def _weighed(row, seen, g, slots, a):
    """Attention a [heads of the group, rows, slots], at most 1; of KVzip+ times ||W_O v|| / ||x||."""
    if row.o["score"] != "kvzip+":
        return a.clamp(max=1)
    size = row.inputs[seen.index][-a.shape[1] :].norm(dim=-1)
    added = row.model.model.layers[seen.index].self_attn.o_proj.weight.unflatten(1, (len(seen.q), -1))
    values = seen.layer.v[g, slots]  # o_proj is fed [head, dimension]
    each = torch.stack([values @ added[:, h].T for h in range(g * row.group, (g + 1) * row.group)])
    return (a / size[:, None]).clamp(max=1 / size.min()) * each.norm(dim=-1)[:, None]


def _join(o, carry, numbers):
    for slot, x in numbers.items():
        old = carry.get(slot, x)
        carry[slot] = dict(keep=old, max=max(old, x), none=x)[o["carry"]]


def _part_numbers(row, seen):
    """For a part of a prompt that was read before: the part's slots get the largest attention over all parts' rows, and
    so do slots older than the prompt. Attention over the first `sink` slots, the
    part and the repetition. After the last part the numbers are joined with the slots' old ones."""
    o, fresh = row.o, row.fresh.setdefault(seen.index, [{} for _ in seen.layer.alive])
    start = row.seen - len(row.prompt)
    for slots, g in zip(seen.layer.alive, range(len(fresh))):
        a, _ = observers(row, seen, g)
        own = [t - start in row.part for t in slots]
        others = [i for i, mine in enumerate(own) if not mine and i >= o["sink"]]
        a = a / (1 - a[:, :, others].sum(-1, keepdim=True))
        told = [t for t, mine in zip(slots, own) if mine or t < start]
        a = _weighed(row, seen, g, slots, a)
        number = dict(zip(slots, a.amax((0, 1)).tolist()))
        fresh[g] |= {t: max(number[t], fresh[g].get(t, 0.0)) for t in told}
        if row.last:
            _join(o, seen.layer.carry[g], fresh[g])


def scores(row, seen, ends):
    """Per kv head the scores of the alive slots, pooled; ends: per kv head the protected slots."""
    o = row.o
    if o["score"] == "streaming":
        return [[float(i) for i in range(len(slots))] for slots in seen.layer.alive]
    one = dict(
        lagkv=oracle_values.lag, defensive=oracle_values.defensive, knorm=_of_keys, keydiff=_of_keys,
        products=_products, expected=oracle_expected.scores, tri=oracle_answers.tri, rkv=oracle_answers.rkv,
        **dict.fromkeys(("h2o", "vatp", "kvzip", "kvzip+", "compactor", "gate"), _carried),
    ).get(o["score"], _of_rows)  # fmt: skip
    each = [one(row, seen, g, end) for g, end in enumerate(ends)]
    if o["score"] == "tova" and not o["per_head"]:
        each = [[sum(x) / len(x) for x in zip(*each)]] * len(each)
    return each


def _of_keys(row, seen, g, end):
    k = seen.layer.k[g, seen.layer.alive[g]]
    if row.o["score"] == "knorm":
        return (-k.pow(2).sum(-1).sqrt()).tolist()
    mean = (k / k.norm(dim=-1, keepdim=True) if row.o["unit"] else k).mean(0)
    return (-(k @ mean) / (k.pow(2).sum(-1) * mean.pow(2).sum()).sqrt()).tolist()


def _carried(row, seen, g, end):
    slots, carry = seen.layer.alive[g], seen.layer.carry[g]
    size = seen.layer.v[g, slots].abs().sum(1).tolist() if row.o["score"] == "vatp" else [1.0] * len(slots)
    return [carry[t] * x for t, x in zip(slots, size)]


def _products(row, seen, g, end):
    """ChunkKV's algorithms: q k of a window's rows, unscaled, without a mask or softmax."""
    o, mine = row.o, slice(g * row.group, (g + 1) * row.group)
    q = seen.q[mine, max(0, seen.new - o["window"]) : seen.new]
    if not row.reading:
        q = torch.stack([queries for _, queries, _ in seen.layer.asked[-o["window"] :]], 1)[mine]
    score = (q @ seen.layer.k[g, seen.layer.alive[g]].T).sum(1).mean(0).tolist()
    return pool(score, o["pool"], o["kernel"], *end)


def _ranks(heads, inside):
    """Per slot minus the best place that it has in one of the query heads' orders of the slots `inside`."""
    places = [{i: at for at, i in enumerate(sorted(inside, key=lambda i: -head[i]))} for head in heads]
    return [-float(min(place.get(i, len(heads[0])) for place in places)) for i in range(len(heads[0]))]


def _of_rows(row, seen, g, end):
    o, v = row.o, seen.layer.v[g, seen.layer.alive[g]]
    a, out = observers(row, seen, g)
    pooled = partial(pool, kind=o.get("pool", "none"), kernel=o.get("kernel", 1), first=end[0], last=end[1])
    if o["score"] == "tova":
        return a.sum(1).mean(0).tolist()
    if o["score"] == "fastkv":  # pooled before the group is reduced
        heads = torch.tensor([pooled(head.tolist()) for head in _reduced(a, o["reduce"], 1)], dtype=torch.double)
        return _reduced(heads, o["group"], 0).tolist()
    if o.get("per_query"):
        slots = seen.layer.alive[g]
        kept = kept_between(row, slots, end)
        inside = [i for i in range(end[0], len(slots) - end[1]) if i not in kept]
        return _ranks([pooled(head.tolist()) for head in _reduced(a, o["reduce"], 1)], inside)
    if o["score"] == "cake":
        variance = a.var(1, correction=1) if a.shape[1] > 1 else 0.0
        score = (a.mean(1) + 200 * variance).mean(0)
    elif o["score"] in ("edie", "edie-exact"):
        term = a / (1 - a).clamp(min=1e-6) * (v - out[:, :, None]).abs().sum(-1)
        if o["score"] == "edie":
            term = a / (1 + o["alpha"] - a) * (v.abs().sum(-1) + out.abs().sum(-1, keepdim=True))
        weight = _row_weights(a, seen.layer.alive[g], row.chunk_end, o["weight"], before(row))
        score = (weight[..., None] * term).sum((0, 1))
    else:
        score = _reduced(_reduced(a, o["reduce"], 1), o["group"], 0)
        score = score * v.abs().sum(1) if o["score"] == "paasvn" else score
    score = score.tolist()
    kept = kept_between(row, seen.layer.alive[g], end) if o.get("pool", "none") != "none" else ()
    apart = [(-torch.inf if o["pool"] == "max" else 0.0) if i in kept else x for i, x in enumerate(score)]
    return [score[i] if i in kept else x for i, x in enumerate(pooled(apart))]


def _reduced(x, kind, dim):
    return x.amax(dim) if kind == "max" else getattr(x, kind)(dim)


def _row_weights(a, slots, T, weight, hidden):
    """c_j [G, R], EDIE eq. 10: w is the number of rows, T tokens were seen through them, `hidden` ones excepted."""
    w = a.shape[1]
    low = w if weight in ("middle", "i>w") else 0
    high = T - 2 * w if weight in ("middle", "i<=t-2w") else T
    seen = [(i, t) for i, t in enumerate(slots) if t not in hidden]
    inside = [i for i, t in seen if low <= t < high] or [i for i, t in seen if t < T - w]
    return a[:, :, inside].amax(-1) if inside and weight != "none" else torch.ones(a.shape[:2], dtype=torch.double)


def pool(score, kind, kernel, first, last):
    """Stride 1 over the unprotected slots; max pads with -inf, avg with zeros and divides by the kernel size."""
    end, half = len(score) - last, kernel // 2
    if kind == "none":
        return score
    near = {i: score[max(first, i - half) : min(end, i + half + 1)] for i in range(first, end)}
    return [score[i] if i not in near else max(near[i]) if kind == "max" else sum(near[i]) / kernel
            for i in range(len(score))]  # fmt: skip


def refined(row, seen, scores):
    """The numbers to rank: `scores` or, per kv head, CAOTE of them."""
    o = row.o
    if o["refine"] in ("none", "critical"):
        return scores
    result = []
    for g, slots in enumerate(seen.layer.alive):
        v = seen.layer.v[g, slots]
        h = torch.tensor(scores[g], dtype=torch.double)
        result.append(caote(h, v, o["refine"] == "fastcaote", o["squared"]).tolist())
    return result


def layer_error(row, seen, ends):
    """TADA's E_int: the numbers to rank, unpooled, summed over heads and over slots that are not protected."""
    chosen, row.o = row.o, row.o | dict(pool="none")
    ranked = refined(row, seen, row._scores(seen, ends))
    row.o = chosen
    return sum(sum(x[first : len(x) - last]) for x, (first, last) in zip(ranked, ends))
