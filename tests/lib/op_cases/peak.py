"""Arguments of `peak`, and its result against the oracle's."""

import ref
import torch
from helpers import FP32, call, close
from problems import alive_counts

from kvevict.ops import _ops as ops


def prepared(p, seed, causal):
    """Random ranges, some of them empty or whole."""
    gen, n = torch.Generator().manual_seed(seed), alive_counts(p)
    ends = (torch.rand(2, *n.shape, generator=gen) * 1.4 - 0.2).clamp(0, 1) * n
    lo, hi = ends.round().to(torch.int32).sort(0).values
    return {**p, "causal": causal, "lo": lo, "hi": hi, "lse": None}


def check(p):
    got, want = call(ops.peak, p), call(ref.peak, p)
    assert got.dtype == torch.float32
    close(got, want, 2 * FP32)  # a = exp(x - lse) adds the errors of both; fp32 whatever the dtype
    for b, row in enumerate(p["row_first"]):
        assert (got[b, :, :row] == 0).all()
    return got
