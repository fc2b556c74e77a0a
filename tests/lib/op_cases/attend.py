"""Arguments of `attend`, and its result against the oracle's."""

import problems
import ref
import torch
from helpers import FP32, OUT, call, close

from kvevict.ops import _ops as ops


def causal(make):
    return lambda *args, **options: {**make(*args, **options), "stop": None}


problem, fuzz, matrix = map(causal, (problems.problem, problems.fuzz, problems.matrix))


def check(p):
    """In 16 bits number by number: a kernel may round both the weights and the output to the dtype, each by half a
    unit. The sum of weighted |v| bounds the effect, and fp32's rounding. fp16 has no weights below 2^-25 of the
    largest."""
    (out, lse), (want, want_lse) = call(ops.attend, p), call(ref.attend, p)
    assert out.dtype == p["q"].dtype and lse.dtype == torch.float32
    if out.dtype == torch.float32:
        close(out, want, FP32)
    else:
        sizes, _ = call(ref.attend, {**p, "size": True})
        limit = 2 * OUT[out.dtype] * sizes + 2.0**-25 * (p["held_k"].shape[0] + p["k"].shape[2])
        assert torch.equal(out.isnan(), want.isnan()) and ((out.double() - want).abs() <= limit)[~want.isnan()].all()
    close(lse, want_lse, FP32, least=1.0)  # fp32 whatever the dtype: a logit of size 1 has that much error itself
    return out, lse
