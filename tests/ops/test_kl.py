import pytest
import ref
import torch
from helpers import call, on_cpu, opcheck, same_bits, same_for_threads
from op_cases.kl import check, grads, prepared
from problems import fuzz, i32, matrix, of_matrix, problem, refuses

from kvevict.ops import _ops as ops


@of_matrix
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


WRONG = {  # beside what test_table.py gives every argument
    "target of other heads": lambda p: {"target": p["target"][:, 1:].contiguous()},
    "too few columns": lambda p: {"columns": 2},
    "rows": lambda p: {"row_first": p["row_first"] + 99},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_errors(wrong):
    p = prepared(problem(9, lens=[[3, 1], [4, 2]], first=0, layout="dense"), 1)
    refuses(ops.kl, lambda p: call(ops.kl, p), p, WRONG[wrong])


@pytest.mark.parametrize("seed", range(3))
def test_opcheck(seed):
    p = prepared(problem(10 + seed, lens=9, first=0), 0)
    opcheck("kl", {**p, "q": p["q"].requires_grad_(), "k": p["k"].requires_grad_(), "sinks": None})
