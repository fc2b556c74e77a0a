import pytest
import torch
from helpers import FP32, call, opcheck, same_for_threads
from op_cases.quadratic import check, prepared
from problems import DTYPES, NAN, alive_counts, fuzz, i32, matrix, of_matrix, problem, refuses

from kvevict.ops import _ops as ops


@of_matrix
def test_matches(case, dtype):
    check(prepared(matrix(case, dtype, T=17), "kv"[case // 2 % 2], case))


@pytest.mark.parametrize("seed", range(20))
def test_fuzz(seed):
    check(prepared(fuzz(seed), "kv"[seed // 2 % 2], seed, seed % 5))


def test_lengths():
    p = problem(3, B=1, Hkv=6, T=1, S=0, D=40, lens=[[0, 1, 63, 64, 257, 300]], first=0)
    check(prepared({**p, "stop": i32([0])}))


def test_the_square_of_a_norm():
    """A = W^T W."""
    p = prepared(problem(5, G=2, D=24, layout="dense"), "v")
    W = torch.randn(2, 4, 50, 24, dtype=torch.double)
    group = p["held_len"].repeat_interleave(2, 1)
    got = call(ops.quadratic, p | {"matrix": (W.mT @ W).float(), "linear": None})
    for b, h in ((0, 0), (1, 3)):
        offset = p["held_offset"][b, h // 2]
        x = p["held_k"][offset : offset + group[b, h]].double()
        want = (x @ W[b, h].T).square().sum(1)
        torch.testing.assert_close(got[b, h, : len(x)].double(), want, rtol=100 * FP32, atol=0)


def test_nan_stays_in_its_slot():
    p = prepared(problem(7, lens=[[30, 40], [5, 64]], first=0), "v")
    p["held_k"][p["held_offset"][1, 1] + 20, 3] = NAN
    assert check(p).isnan().nonzero().tolist() == [[1, 2, 20], [1, 3, 20]]


def test_nan_stays_in_its_head():
    p = prepared(problem(7, lens=[[30, 40], [5, 64]], first=0))
    p["matrix"] = p["matrix"].clone()
    p["matrix"][0, 1, 2, 3] = NAN
    assert {(b, h) for b, h, _ in check(p).isnan().nonzero().tolist()} == {(0, 1)}


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads(dtype):
    p = prepared(problem(9, B=1, lens=[[3000, 1333]], dtype=dtype))
    assert same_for_threads(lambda: [call(ops.quadratic, p)])


WRONG = {  # beside what test_table.py gives every argument
    "columns under n": lambda p: {"columns": int(alive_counts(p).max()) - 1},
    "columns negative": lambda p: {"columns": -1}, "x dtype": lambda p: {"x": p["x"].half()},
    "x shape": lambda p: {"x": p["x"][..., :56]}, "matrix not square": lambda p: {"matrix": p["matrix"][:, :, :56]},
    "heads": lambda p: {"matrix": p["matrix"][:, :3]}, "heads of linear": lambda p: {"linear": p["linear"][:, :3]},
    "stop over S": lambda p: {"stop": i32([0, 10])},
    "len past the buffer": lambda p: {"held_len": i32([[3, 10**6], [0, 0]]), "columns": 2 * 10**6},
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_errors(wrong):
    p = prepared(problem(11, lens=[[3, 1], [4, 2]], first=0, layout="dense"))
    refuses(ops.quadratic, check, p, WRONG[wrong])


def test_opcheck():
    opcheck("quadratic", prepared(problem(12)))
