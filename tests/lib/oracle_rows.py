"""The observing queries (METHODS sections 1a, 3 and 7), in float64: the part of `oracle.Row` for them.

Every choice of rows comes down to `observers`: of one kv head the attention of R queries to its n alive slots, a
[G, R, n], and their outputs, out [G, R, d]. Scores, CAOTE by row, CAKE's moments and TADA's error use nothing else.
"""

import math

import torch

LATER = 1 << 30  # the token number of rows that see every slot
OPTIONS = {
    "none": {}, "last": {}, "all": {}, "window": dict(window=32, keep_window=True),
    "probe": dict(probe=32, ema_alpha=0.2, append=True, ema="moved", ending=None, ends=False, request=(), before=None),
    "given": dict(ids=()),
    "repeat": dict(part=2048),
    "drafted": dict(n_d=8, window=8, draft_keys=False, draft_model="self"),
}  # fmt: skip


def length(probe):
    return len(within(probe, 0)) if isinstance(probe, tuple) else probe


def within(probe, tokens):
    """The tokens of a span (start, stop), or of several, of so many."""
    spans = probe if isinstance(probe[0], tuple) else (probe,)
    return [t + tokens * (start < 0) for start, stop in spans for t in range(start, stop)]


def waits_for_a_draft(o):
    """Whether the rows do not exist before the whole prompt was read."""
    return o["rows"] == "drafted" and o["draft_model"] == "self"


def while_decoding(o):
    """How many of the newest decoded rows observe in place of a prompt's rows."""
    one = dict.fromkeys(("none", "last", "all", "repeat"), 1)
    many = dict(window="window", probe="probe", drafted="window" if o.get("window") else "n_d")
    if o["rows"] == "given":
        return len(o["ids"])
    return one[o["rows"]] if o["rows"] in one else length(o[many[o["rows"]]])


def protected(row):
    """Number of the last slots that are kept because they are the rows'."""
    o = row.o
    if o["rows"] in ("window", "drafted"):
        return 0 if not o.get("keep_window", True) else o["window"] if row.reading else while_decoding(o)
    if o["rows"] == "probe":
        ending = min(o["ending"] or length(o["probe"]), len(row.prompt) // 2)
        if isinstance(o["probe"], tuple):
            ending = min(ending, 8)
        return max(ending if row.last else 0, requested(row)) if row.reading else while_decoding(o)
    return 0


def requested(row):
    """The last slots that belong to the request: the longest of its beginnings that half of the budget holds, or else
    an eighth of the budget; less the tokens that are still to be read."""
    budget, beginnings = row.layer_budget // len(row.layers[0].alive), row.o["request"]
    eighth = min(budget // 8, max(beginnings)) if beginnings else 0
    kept = max((n for n in beginnings if n <= budget // 2), default=eighth)
    return max(kept - row.ahead, 0)


def limit(row):
    """(position, n): of the slots from this position on, the request's, a head keeps n at most, if half of the budget
    holds none of its beginnings."""
    budget, beginnings = row.layer_budget // len(row.layers[0].alive), row.o.get("request", ()) if row.reading else ()
    holds = any(n <= budget // 2 for n in beginnings)
    return (row.end - max(beginnings), 3 * budget // 8) if beginnings and not holds else (math.inf, 0)


def before(row):
    """The tokens of the question before the text, which appended rows and observers do not see; `before`: (start, stop,
    whether nothing repeats it)."""
    asked = row.o.get("before") if row.reading else None
    return range(row.end - len(row.prompt) + asked[0], row.end - len(row.prompt) + asked[1]) if asked else range(0)


def kept_between(row, slots, ends):
    """The indices of these slots that are kept too because they are the question's, where a quarter of the budget holds
    it and nothing repeats it."""
    tokens, quarter = before(row), row.layer_budget // len(row.layers[0].alive) // 4
    once = tokens and row.o["before"][2] and len(tokens) <= quarter
    return [i for i in range(ends[0], len(slots) - ends[1]) if once and slots[i] in tokens]


def always(o):
    """The most that `protected` is."""
    kept = o["rows"] in ("window", "probe", "drafted") and o.get("keep_window", True)
    return while_decoding(o) if kept else 0


def begin(row, ids):
    """A read of the tokens `ids`: the length of its probe, and the appended rows, (ids, positions in the text)."""
    o, N = row.o, len(ids)
    row.end = row.seen + N
    row.p, row.appended, at = 0, [], range(row.seen + N, row.seen + N + LATER)
    row.prompt, row.fresh = {row.seen + i: t for i, t in enumerate(ids)}, {}
    if o["rows"] == "probe":
        spans = isinstance(o["probe"], tuple)
        row.p = length(o["probe"]) if spans else min(o["probe"], N // 2)
        where = within(o["probe"], N) if spans else range(N - row.p, N)
        row.appended = [(ids[t], row.seen + t) for t in where] if o["append"] else []
        row.rest = N - where[0] if row.p else 0  # tokens from the probe on
    elif o["rows"] == "given":
        row.appended = list(zip(o["ids"], at))
    elif o["rows"] == "drafted" and not waits_for_a_draft(o):
        row.appended = list(zip(row.follow(ids), at))


def begin_chunk(row, stop):
    """The rows appended to a chunk that ends at token `stop`: (ids, positions)."""
    o = row.o
    row.ahead = row.end - stop
    row.own_probe = o["rows"] == "probe" and row.last and (not isinstance(o["probe"], tuple) or o["ends"])
    if o["rows"] == "repeat" and o["schedule"] == "chunk":
        extra = again(row, range(row.seen, stop))
        return extra, list(range(stop, stop + len(extra)))
    if not row.appended or row.own_probe:
        return [], []
    extra, true = map(list, zip(*row.appended))
    return extra, list(range(stop, stop + len(extra))) if o["rows"] == "probe" else true


def parts(row, tokens):
    """The parts, tokens from 0, that are repeated once a prompt was read: KVzip's, in one where a number is not the
    largest over rows."""
    o = row.o
    if o["rows"] != "repeat" or o["schedule"] == "chunk":
        return []
    size = o["part"] if o["score"] in ("kvzip", "kvzip+") else tokens
    return [range(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def again(row, tokens):
    """The ids that repeat some of the row's tokens."""
    return [row.prompt[t] for t in tokens]


def end_of_attention(row, seen):
    """Eq. 9. Earlier queries are rotated to the probe's present positions before they are averaged, or as printed."""
    o, layer, p = row.o, seen.layer, row.p
    if o["rows"] != "probe" or not o["append"] or not row.reading:
        return
    rest = row.rest if row.own_probe else p
    first = seen.q.shape[1] - rest  # layers may read fewer tokens, but all from the probe on
    now, at = seen.q[:, first : first + p], row.at[len(row.at) - rest] if p else 0
    if layer.probe is not None:
        past = layer.probe
        past = past if o["ema"] == "before" else row.turn(row.turn(past, -layer.probe_at), at)
        now = o["ema_alpha"] * past + (1 - o["ema_alpha"]) * now
    layer.probe, layer.probe_at = now, at


def chunk_rows(row):
    """Number of the chunk's rows that observe."""
    o = row.o
    if o["rows"] == "probe":
        return 0 if o["append"] else row.p
    return {"last": 1, "all": LATER, "given": 0, "repeat": 0}.get(o["rows"], o.get("window", 0))


def observers(row, seen, g):
    """(a, out) of kv head g; slots that must not be scored (a probe's) get 0."""
    o, layer, slots, parts = row.o, seen.layer, seen.layer.alive[g], []
    if not row.reading:
        return _decoded(row, seen, g)
    if o["rows"] == "probe" and o["append"]:
        unseen = min(row.rest, requested(row)) if isinstance(o["probe"], tuple) else row.rest
        n = len(slots) - (unseen if row.own_probe else 0)
        seen_by = [LATER] * row.p, layer.k[g, slots[:n]], slots[:n], None, (0, n)
        a = row.weights(seen, g, layer.probe, *seen_by)
        a = torch.nn.functional.pad(a, (0, len(slots) - n))
        parts.append((a, a @ layer.v[g, slots]))
    elif o["rows"] == "given" or o["rows"] == "repeat":
        parts.append((seen.appended[g], seen.out[g][:, seen.new :]))
    elif waits_for_a_draft(o):
        parts.append(_later(row, seen, g, *row.drafted[seen.index]))
    elif o["rows"] == "drafted" and o["draft_keys"]:
        parts.append((seen.appended[g], seen.out[g][:, seen.new :]))
    elif o["rows"] == "drafted":
        parts.append(_later(row, seen, g, seen.q[:, seen.new :]))
    count = min(chunk_rows(row), seen.new)
    if count:
        parts.append((seen.attention[g][:, -count:], seen.out[g][:, seen.new - count : seen.new]))
    return tuple(torch.cat(each, 1) for each in zip(*parts))


def _later(row, seen, g, q, k=None, v=None):
    """(a, out) of rows q [H, R, d] after all slots; with `draft_keys` their keys and values count too, causally."""
    slots, layer, R = seen.layer.alive[g], seen.layer, q.shape[1]
    keys, values = layer.k[g, slots], layer.v[g, slots]
    if not row.o["draft_keys"]:
        a = row.weights(seen, g, q, [LATER] * R, keys, slots)
        return a, a @ values
    rows = [LATER + i for i in range(R)]
    a = row.weights(seen, g, q, rows, torch.cat([keys, k[g]]), [*slots, *rows])
    return a[..., : len(slots)], a @ torch.cat([values, v[g]])


def _decoded(row, seen, g):
    """Of decoded rows: their attention over the slots alive now, and the outputs of the step that decoded them."""
    slots, mine = seen.layer.alive[g], slice(g * row.group, (g + 1) * row.group)
    tokens, queries, outs = zip(*seen.layer.asked[-while_decoding(row.o) :])
    a = row.weights(seen, g, torch.stack(queries, 1), tokens, seen.layer.k[g, slots], slots)
    return a, torch.stack(outs, 1)[mine]


def turned(row, turns, drafted):
    """The mean over the observing rows of how far a layer rotated the residual stream: turns [T] of the last call's
    rows, drafted [R] of those that were drafted after it."""
    o, new = row.o, len(turns) - row.extra
    count = row.p if row.own_probe else min(chunk_rows(row), new)
    return torch.cat([turns[new - count :], drafted] if waits_for_a_draft(o) else [turns[new - count :]]).mean().item()
