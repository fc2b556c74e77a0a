"""Arguments of attend's ops with observers, and the ops one after the other, whose bits they must have."""

import torch
from helpers import call, same_bits
from op_cases import peak, score
from problems import alive_counts, i32

from kvevict.ops import _ops as ops

OF = {"score": ops.attend_score, "error": ops.attend_error, "peak": ops.attend_peak}
APART = {"score": ops.score, "error": ops.error, "peak": ops.peak}


def prepared(p, observers, of="score", *, causal=True, seed=0, **more):
    """Arguments of attend_<of> for the last rows of the problem p. Rows of its padding do not observe."""
    T, S = p["q"].shape[2], p["k"].shape[2]
    hidden = p["first"] + T - S - (T - observers)  # rows of padding among the observers
    p = {**p, "observers": observers, "row_first": hidden.clamp(0, observers).int()}
    p["stop"] = i32(p["stop"]).clamp_min(p["first"])
    if of == "peak":
        p = peak.prepared(p, seed, causal)
    else:
        p = {**p, "causal": causal, "columns": int(alive_counts(p).max()) + 3}
    gen, (B, H) = torch.Generator().manual_seed(seed), p["q"].shape[:2]
    weight = torch.rand(B, H, observers + 2, generator=gen)[..., 2:] if seed % 2 and of != "peak" else None
    options = dict(score=dict(reduce=score.REDUCE[seed % 3]), error=dict(kind="edie", alpha=0.1), peak={})[of]
    if options.get("reduce") == "max":
        weight = None
    return {**p, **options, "weight": weight, **more}


def apart(p, of="score"):
    """What attend_<of> must give: attend, then the op, on the last rows of q with their lse and outputs."""
    out, lse = call(ops.attend, {**p, "stop": None})
    start = p["q"].shape[2] - p["observers"]
    q, own = p["q"][:, :, start:], lse[:, :, start:]
    if p.get("span", -1) >= 0:
        few = {**p, "q": q, "held_len": p["held_len"].clamp_max(p["span"]), "stop": None}
        own = call(ops.attend, few)[1]
    return out, lse, call(APART[of], {**p, "q": q, "lse": own, "o": out[:, start:]})


def check(p, of="score"):
    got, want = call(OF[of], p), apart(p, of)
    for one, other in zip(got, want, strict=True):
        assert same_bits(one, other)
    return got
