"""Arguments of `quadratic`, and its result against the oracle's."""

import ref
import torch
from helpers import FP32, call
from problems import alive_counts

from kvevict.ops import _ops as ops


def prepared(p, of="k", seed=0, extra=3):
    """Seeds that are odd have no linear part; every third has one matrix for all rows of the batch."""
    generator, (B, H, _, D) = torch.Generator().manual_seed(seed), p["q"].shape
    A = torch.randn(1 if seed % 3 == 0 else B, H, D, D + 3, generator=generator)[..., :D].expand(B, -1, -1, -1)
    linear = None if seed % 2 else torch.randn(B, D, H, generator=generator).transpose(1, 2)
    rows = {name: p[name] for name in ("held_offset", "held_len", "first", "stop")}
    rows |= {"held_k": p[f"held_{of}"], "held_k_kind": p[f"held_{of}_kind"], "x": p[of]}
    return {**rows, "columns": int(alive_counts(p).max()) + extra, "matrix": A, "linear": linear}


def check(p):
    """Slot by slot, by the sum of its terms' absolute values: two sums of D terms, D <= 512, rounded at random."""
    got, want, size = call(ops.quadratic, p), call(ref.quadratic, p), call(ref.quadratic, {**p, "size": True})
    assert got.dtype == torch.float32 and torch.equal(got.isnan(), want.isnan())
    assert not ((got - want).abs() > FP32 / 5 * size).any()
    group = got.shape[1] // p["held_len"].shape[1]
    assert (got[torch.arange(p["columns"]) >= alive_counts(p).repeat_interleave(group, 1)[..., None]] == 0).all()
    return got
