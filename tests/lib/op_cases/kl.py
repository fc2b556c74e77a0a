"""Arguments of `kl`, and its result against the oracle's."""

import helpers
import ref
import torch
from helpers import FP32, Moved, back, close, named

from kvevict.ops import _ops as ops

# Of the gradients, relative to the largest: fp32, and the rounding of 16-bit results.
GRAD = {torch.float32: 4 * FP32, torch.bfloat16: 2.0**-8 + 4 * FP32, torch.float16: 2.0**-11 + 4 * FP32}


def prepared(p, seed, causal=True, columns=None):
    """A target over some of the alive slots, or over more than there are."""
    gen = torch.Generator().manual_seed(seed)
    (B, H), S, alive = p["q"].shape[:2], p["k"].shape[2], int((p["held_len"] + p["stop"][:, None]).max())
    columns = max(1, alive - p["q"].shape[2] * causal) if columns is None else columns
    target = torch.rand(B, H, columns, generator=gen).pow(4)
    if seed % 3 == 1:
        target[:, :, ::2] = 0
    return {**p, "causal": causal, "target": target, "columns": int(p["held_len"].max()) + S}


def grads(fn, p):
    """(loss, gradient of q, of k), the reference's all in float64."""
    kind = torch.double if fn is ref.kl else p["q"].dtype
    moved = Moved(helpers.device if fn is ops.kl else torch.device("cpu"))
    q, k = (moved(p[name]).detach().to(kind, copy=True).requires_grad_() for name in "qk")
    loss = fn(**named(fn, p, moved) | {"q": q, "k": k})
    loss.backward()
    return back((loss.detach(), q.grad, k.grad))


def check(p, tol=None):
    got, want = grads(ops.kl, p), grads(ref.kl, p)
    assert got[0].dtype == torch.float32 and got[1].dtype == p["q"].dtype
    close(got[0], want[0].double(), 4 * FP32, least=0.1)
    for mine, true in zip(got[1:], want[1:]):
        close(mine, true.double(), tol or GRAD[p["q"].dtype], least=1e-6)
    return got
