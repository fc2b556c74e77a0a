"""Arguments of `linear`, and its result against the oracle's."""

import ref
import torch
from helpers import call

from kvevict.ops import _ops as ops

ROUNDED = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def drawn(B, T, N, K, dtype, bias=True, seed=0):
    """x with a stride of its own in each dimension."""
    generator = torch.Generator().manual_seed(seed)
    x, weight, more = (torch.randn(*n, generator=generator) for n in ((T, B, K + 8), (N, K), (N,)))
    x = x.to(dtype).transpose(0, 1)[..., 3 : K + 3]
    return dict(x=x, weight=weight.to(dtype), bias=more.to(dtype) if bias else None)


def check(p):
    """A sum of K products and a bias in fp32, in any order, rounded to the dtype once."""
    got, want, size = call(ops.linear, p), ref.linear(**p), ref.linear(**p, size=True)
    assert got.dtype == p["x"].dtype and got.shape == want.shape
    sums = (p["x"].shape[-1] + 1) * 2.0**-24 * size
    assert ((got.double() - want).abs() <= sums + ROUNDED[got.dtype] * (want.abs() + sums)).all()
    return got
