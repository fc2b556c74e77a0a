"""Arguments of `norm`, and its result against the oracle's."""

import ref
import torch
from helpers import FP32, call
from problems import alive_counts

from kvevict.ops import _ops as ops


def prepared(p, of, norm, extra=3):
    rows = dict(held_k=p[f"held_{of}"], held_k_kind=p[f"held_{of}_kind"], x=p[of], p=norm)
    rows["columns"] = int(alive_counts(p).max()) + extra
    return {name: p[name] for name in ("held_offset", "held_len", "first", "stop")} | rows


def check(p):
    """Slot by slot; at most 256 / 8 terms are added one after the other, none is negative."""
    got, want = call(ops.norm, p), call(ref.norm, p)
    assert got.dtype == torch.float32 and torch.equal(got.isnan(), want.isnan())
    assert not ((got - want).abs() > FP32 * want).any()
    assert (got[torch.arange(p["columns"]) >= alive_counts(p)[..., None]] == 0).all()
    return got
