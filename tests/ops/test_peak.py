import pytest
import torch
from helpers import call, opcheck, same_bits, same_for_threads
from op_cases.peak import check, prepared
from problems import NAN, alive_counts, fuzz, i32, matrix, of_matrix, problem, refuses

from kvevict.ops import _ops as ops


@of_matrix
def test_matches(case, dtype):
    check(prepared(matrix(case, dtype, T=17), case, causal=case % 2 == 0))


@pytest.mark.parametrize("seed", range(40))
def test_fuzz(seed):
    p = prepared(fuzz(seed), seed, causal=seed % 2 == 0)
    if seed % 4 > 1:
        p["lse"] = torch.randn(*p["q"].shape[:2], 2 * p["q"].shape[2])[..., : p["q"].shape[2]] + 4
    check(p)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lens, R, S", [(0, 1, 1), (1, 1, 0), (0, 5, 0), (2, 9, 1), (5, 1, 9), (700, 70, 40)])
def test_lengths(lens, R, S, causal):
    p = problem(2, lens=lens, T=R, S=S, first=0)
    p |= {"stop": i32([S, S]), "row_first": i32([0, 0])}
    whole = prepared(p, 0, causal)
    check({**whole, "lo": 0 * whole["lo"], "hi": alive_counts(p)})
    for seed in range(3):
        check(prepared(p, seed, causal))


def test_is_the_maximum_of_score():
    """Over the whole range of one head: the columns that score leaves apart."""
    p = problem(3, B=1, G=1, Hkv=1, T=1, S=0, lens=[[900]], first=0)
    p |= {"row_first": i32([0]), "stop": i32([0]), "lo": i32([[0]]), "hi": i32([[900]]), "causal": False}
    each = call(ops.score, {**p, "reduce": "sum", "columns": 900})
    assert same_bits(call(ops.peak, p), each.amax(-1, keepdim=True))


def test_outside_the_range_is_not_read():
    p = prepared(problem(4, T=12, lens=[[30, 40], [5, 64]], first=0, layout="dense"), 4, True)
    p |= {"stop": i32([12, 12]), "row_first": i32([0, 5]), "lse": torch.full((2, 4, 12), 3.0)}
    p |= {"lo": i32([[3, 1], [0, 20]]), "hi": i32([[20, 39], [5, 20]])}
    want = check(p)
    for b, h in ((0, 0), (0, 1), (1, 1)):
        for i in (p["lo"][b, h] - 1, p["hi"][b, h]):
            p["held_k"][p["held_offset"][b, h] + i] = NAN
    assert same_bits(check(p), want)
    p["held_k"][p["held_offset"][0, 1] + 38] = NAN
    assert check(p)[0, 2:].isnan().all()


def test_threads():
    p = prepared(problem(9, B=1, G=4, T=300, lens=[[700, 333]], dtype=torch.bfloat16), 9, True)
    assert same_for_threads(lambda: [call(ops.peak, p)])


WRONG = {  # beside what test_table.py gives every argument
    "lo negative": lambda p: {"lo": p["lo"] - 1}, "lo over hi": lambda p: {"lo": p["hi"] + 1},
    "hi over n": lambda p: {"hi": alive_counts(p) + 1}, "lo shape": lambda p: {"lo": p["lo"][:1]},
    "row_first over R": lambda p: {"row_first": i32([0, 10])}, "lse shape": lambda p: {"lse": torch.zeros(2, 4, 8)},
    "stop over S": lambda p: {"stop": i32([0, 10])},
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_errors(wrong):
    p = prepared(problem(11, lens=[[3, 1], [4, 2]], first=0, layout="dense"), 11, False)
    refuses(ops.peak, check, p | {"lo": 0 * p["lo"], "hi": alive_counts(p)}, WRONG[wrong])


def test_opcheck():
    opcheck("peak", prepared(problem(12), 12, True))
