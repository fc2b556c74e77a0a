"""Arguments of `score`, and its result against the oracle's."""

import itertools

import ref
import torch
from helpers import FP32, call, close
from problems import alive_counts

from kvevict.ops import _ops as ops

TERM = ["a", "square", "entropy"]
REDUCE = ["sum", "mean", "max"]
GROUP = ["mean", "sum", "max", "none"]


def prepared(p, causal, reduce, extra=3):
    return {**p, "causal": causal, "reduce": reduce, "columns": int(alive_counts(p).max()) + extra, "lse": None}


def check(p):
    got, want = call(ops.score, p), call(ref.score, p)
    assert got.dtype == torch.float32
    close(got, want, 2 * FP32)  # a = exp(x - lse) adds the errors of both; fp32 whatever the dtype
    for b, h in itertools.product(*map(range, got.shape[:2])):
        assert (got[b, h, alive_counts(p)[b, h * p["held_len"].shape[1] // got.shape[1]] :] == 0).all()
    return got
