import pytest
import torch
from helpers import call, opcheck, same_for_threads
from op_cases.norm import check, prepared
from problems import NAN, alive_counts, fuzz, i32, matrix, of_matrix, problem, refuses

from kvevict.ops import _ops as ops


@pytest.mark.parametrize("of", "kv")
@pytest.mark.parametrize("norm", [1, 2])
@of_matrix
def test_matches(case, dtype, norm, of):
    check(prepared(matrix(case, dtype, T=17), of, norm))


@pytest.mark.parametrize("seed", range(20))
def test_fuzz(seed):
    check(prepared(fuzz(seed), "kv"[seed % 2], 1 + seed // 2 % 2, seed % 5))


@pytest.mark.parametrize("norm", [1, 2])
def test_lengths(norm):
    p = problem(3, B=1, Hkv=6, T=1, S=0, lens=[[0, 1, 255, 256, 257, 600]], first=0)
    check(prepared({**p, "stop": i32([0])}, "k", norm))


def test_nan_stays_in_its_slot():
    p = prepared(problem(7, lens=[[30, 40], [5, 64]], first=0), "v", 2)
    p["held_k"][p["held_offset"][1, 1] + 20, 3] = NAN
    assert check(p).isnan().nonzero().tolist() == [[1, 1, 20]]


def test_threads():
    p = prepared(problem(9, B=1, lens=[[3000, 1333]], dtype=torch.bfloat16), "k", 2)
    assert same_for_threads(lambda: [call(ops.norm, p)])


WRONG = {  # beside what test_table.py gives every argument
    "columns under n": lambda p: {"columns": int(alive_counts(p).max()) - 1},
    "columns negative": lambda p: {"columns": -1}, "x dtype": lambda p: {"x": p["x"].half()},
    "x shape": lambda p: {"x": p["x"][..., :56]}, "stop over S": lambda p: {"stop": i32([0, 10])},
    "len past the buffer": lambda p: {"held_len": i32([[3, 10**6], [0, 0]]), "columns": 2 * 10**6},
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_errors(wrong):
    p = prepared(problem(11, lens=[[3, 1], [4, 2]], first=0, layout="dense"), "k", 1)
    refuses(ops.norm, check, p, WRONG[wrong])


def test_opcheck():
    opcheck("norm", prepared(problem(12), "k", 2))
