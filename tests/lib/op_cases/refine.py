"""Arguments of `refine`, and its result against the oracle's."""

import itertools

import ref
import torch
from helpers import FP32, call, held_of
from problems import NAN, alive_counts

from kvevict.ops import _ops as ops

MOST = torch.finfo(torch.float32).max
FORMS = list(itertools.product([False, True], [False, True]))  # fast, squared


def prepared(p, seed=0, extra=3, **more):
    """Scores in fp32, NaN after the alive slots."""
    n = alive_counts(p)
    score = torch.rand(*n.shape, int(n.max()) + extra, generator=torch.Generator().manual_seed(seed))
    score[torch.arange(score.shape[2]) >= n[..., None]] = NAN
    return {**p, "score": score, "fast": False, "squared": False, **more}


def allowed(p, b, h):
    """The allowed error of fp32, per slot of a head: hn / (1 - hn)^2 * (|v_i| + |m|), as 1 - hn and v - m cancel;
    squared, the norm's error counts twice the norm. Both times FP32."""
    v = ref.alive(held_of(p), "v", b, h, p["v"][b, h, p["first"][b] : p["stop"][b]])
    hn = p["score"][b, h, : v.shape[0]].double()
    hn = hn / hn.sum() if hn.sum() else torch.ones_like(hn) / max(1, hn.numel())
    size = v.norm(dim=1) + (v.mean(0) if p["fast"] else hn @ v).norm()
    return FP32 * hn / (1 - hn).clamp(min=1e-7) ** 2 * (2 * size**2 if p["squared"] else size) + 1e-30


def check(p, share=1.0):
    got, want = call(ops.refine, p), call(ref.refine, p)
    assert got.dtype == torch.float32 and torch.equal(got.isnan(), want.isnan())
    for b, h in itertools.product(*map(range, got.shape[:2])):
        n = int(alive_counts(p)[b, h])
        assert (got[b, h, n:] == 0).all()
        x, y = got[b, h, :n].double(), want[b, h, :n]
        assert torch.equal(x == MOST, y == MOST)
        assert not ((x - y).abs() > share * allowed(p, b, h)).any()
    return got
