import helpers
import pytest
import ref
import torch
from helpers import (
    DTYPES,
    ERRORS,
    FP32,
    Moved,
    back,
    call,
    close,
    fuzz,
    i32,
    matrix,
    named,
    on_cpu,
    opcheck,
    problem,
    same_bits,
    same_for_threads,
)

from kvevict import _ops as ops

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


@pytest.mark.quick(case=0)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", range(8))
def test_matches(case, dtype):
    check(prepared(matrix(case, dtype, T=17), case, causal=case % 2 == 0))


@pytest.mark.parametrize("seed", range(30))
def test_fuzz(seed):
    check(prepared(fuzz(seed), seed, causal=seed % 4 < 3))


@pytest.mark.parametrize("options", [{}, dict(softcap=1.5), dict(sinks=True)])
def test_to_three_millionths(options):
    """fp32, as in training: 32 rows after a prompt; largest difference to float64 autograd, relative to the largest
    gradient. A logit of D products and as many sums is off by u sqrt(2 D): its weight's relative error. A gradient has
    the errors of two weights, of the loss and of the gradient's sum: 4 u sqrt(2 D), on any processor."""
    p = problem(3, B=1, Hkv=2, G=3, T=32, D=64, lens=[[700, 700]], first=0, **options)
    check(prepared({**p, "row_first": i32([0]), "stop": i32([32])}, 0, columns=700), tol=4 * 2**-24 * 128**0.5)


def test_equal_is_zero():
    """With the rows' mean attention as the target, the loss and its gradient are 0."""
    p = problem(4, B=1, lens=50, T=5, first=0) | {"row_first": i32([0]), "stop": i32([5])}
    mean_attn = call(ref.score, {**p, "causal": True, "reduce": "mean", "group": "none", "columns": 55})
    p = prepared(p, 0) | {"target": 3 * mean_attn[..., :50].float()}
    loss, dq, dk = grads(ops.kl, p)
    assert abs(loss) < 1e-6 and dq.abs().max() < 1e-5 and dk.abs().max() < 1e-5


@pytest.mark.parametrize("name", ["target", "rows"])
def test_nothing_to_compare(name):
    p = prepared(problem(5, lens=9, T=4, first=0), 0)
    p |= {"target": 0 * p["target"]} if name == "target" else {"row_first": i32([4, 4])}
    loss, dq, dk = grads(ops.kl, p)
    assert loss == 0 and not dq.any() and not dk.any()


def test_only_what_is_needed():
    """q, k and a target: all of k is new, all rows observe, and the softmax's scale is the usual one."""
    p = problem(6, B=1, lens=0, T=7, S=30, first=0) | {"row_first": i32([0]), "stop": i32([30])}
    p = prepared(p, 0, columns=23)
    del p["columns"]
    assert torch.equal(ops.kl(p["q"], p["k"], p["target"]), on_cpu(ops.kl, p))


def test_threads():
    p = prepared(problem(7, B=2, T=40, D=64, lens=700), 0)
    assert same_for_threads(lambda: [x.flatten() for x in grads(ops.kl, p)])


def test_heads_are_apart():
    """A head of the batch gives the same bits alone."""
    p = prepared(problem(8, lens=[[90, 31], [7, 65]], first=0, T=6), 1)
    _, dq, dk = grads(ops.kl, p)
    own = {n: p[n][1:] for n in ("q", "k", "target", "row_first", "held_offset", "held_len", "first", "stop")}
    _, q, k = grads(ops.kl, p | own)
    assert same_bits(q[0], 2 * dq[1]) and same_bits(k[0], 2 * dk[1])  # half of the batch's mean


WRONG = {
    "target of other heads": lambda p: {"target": p["target"][:, 1:].contiguous()},
    "target of 2 dimensions": lambda p: {"target": p["target"][0]},
    "target float64": lambda p: {"target": p["target"].double()},
    "too few columns": lambda p: {"columns": 2},
    "rows": lambda p: {"row_first": p["row_first"] + 99},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_errors(wrong):
    p = prepared(problem(9, lens=[[3, 1], [4, 2]], first=0, layout="dense"), 1)
    call(ops.kl, p)
    with pytest.raises(ERRORS):
        call(ops.kl, {**p, **WRONG[wrong](p)})


@pytest.mark.parametrize("seed", range(3))
def test_opcheck(seed):
    p = prepared(problem(10 + seed, lens=9, first=0), 0)
    opcheck("kl", {**p, "q": p["q"].requires_grad_(), "k": p["k"].requires_grad_(), "sinks": None})
