"""Arguments of `select`, and its result against the oracle's."""

import random

import ref
import torch
from helpers import call
from problems import INF, NAN, i32

from kvevict.ops import _ops as ops

VALUES = [0.0, -0.0, 1.0, 1.0, -1.0, 0.5, 1e-40, -1e-40, 3e38, INF, -INF, NAN]


def drawn(seed, *, B=2, Hkv=3, C=None, ties=True, protect=True):
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    C = rng.choice([1, 2, 7, 16, 63, 64, 65, 200, 777]) if C is None else C
    score = torch.randn(B, Hkv, C, generator=gen)
    if ties:
        score = torch.tensor(VALUES)[torch.randint(rng.choice([2, 5, 12]), (B, Hkv, C), generator=gen)]
    n = i32([[rng.choice([C, rng.randint(0, C)]) for _ in range(Hkv)] for _ in range(B)])
    ends = [i32([rng.choice([0, 0, 1, 4, C]) if protect else 0 for _ in range(B)]) for _ in "fl"]
    least = torch.minimum(n, (ends[0] + ends[1])[:, None])
    keep = least + ((n - least) * torch.rand(n.shape, generator=gen)).round().int()
    columns = int(keep.max()) + rng.choice([0, 2])
    return {"score": score, "n": n, "keep": keep, "protect_first": ends[0], "protect_last": ends[1], "columns": columns}


def check(p):
    got, want = call(ops.select, p), call(ref.select, p)
    assert got.dtype == torch.int32 and torch.equal(got, want)
    return got
