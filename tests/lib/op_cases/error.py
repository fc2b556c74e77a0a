"""Arguments of `error`, and its result against the oracle's."""

import itertools

import ref
import torch
from helpers import FP32, call
from problems import alive_counts

from kvevict.ops import _ops as ops

KINDS = ["edie", "l1", "l2"]
GROUP = ["sum", "mean", "max", "none"]


def prepared(p, kind, causal, seed=0, extra=3, **more):
    """o is random, the last rows of a longer output as a caller passes it; weights are not negative, as EDIE's."""
    gen, (B, H, R, D) = torch.Generator().manual_seed(seed), p["q"].shape
    o = torch.randn(B, R + 3, H, D, generator=gen).to(p["q"].dtype)[:, 3:]
    weight = torch.rand(B, H, R, generator=gen) if seed % 2 else None
    p = {**p, "kind": kind, "causal": causal, "o": o, "weight": weight, "lse": None, "alpha": 0.1, "group": "sum"}
    return {**p, "columns": int(alive_counts(p).max()) + extra, **more}


def check(p):
    """Slot by slot. As in test_score.py a is off by 2 * FP32 of itself; a / (1 - a) multiplies that by 1 / (1 - a)^2.
    No sum has terms of different signs, and both sides read the same v and o for |v - o|."""
    got, want = call(ops.error, p), call(ref.error, p)
    assert got.dtype == torch.float32 and got.shape == want.shape
    slope = call(ref.error, {**p, "power": 2}) * (1 + p["alpha"])
    assert torch.equal(got.isnan(), want.isnan())
    off = (got.double() - want).abs() - 2 * FP32 * slope - 1e-30
    assert not (off > 0).any(), f"off by {off.nan_to_num().max():.3g} more than allowed"
    for b, h in itertools.product(*map(range, got.shape[:2])):
        assert (got[b, h, alive_counts(p)[b, h * p["held_len"].shape[1] // got.shape[1]] :] == 0).all()
    return got
