import pytest
import ref
import torch
from helpers import call, held_of, opcheck, same_bits, same_for_threads
from op_cases.refine import FORMS, MOST, allowed, check, prepared
from problems import DTYPES, INF, NAN, alive_counts, fuzz, i32, matrix, of_matrix, problem, refuses

from kvevict.ops import _ops as ops


@pytest.mark.parametrize("fast, squared", FORMS)
@of_matrix
def test_matches(case, dtype, fast, squared):
    check(prepared(matrix(case, dtype, T=17), case, fast=fast, squared=squared))


@pytest.mark.parametrize("fast, squared", FORMS)
@pytest.mark.parametrize("seed", range(20))
def test_fuzz(seed, fast, squared):
    """Attention-like scores too: most of the mass on few slots."""
    p = prepared(fuzz(seed), seed, seed % 5, fast=fast, squared=squared)
    p["score"] = p["score"] ** (1 + 8 * (seed % 2))
    check(p)


@pytest.mark.parametrize("fast", [False, True])
def test_lengths(fast):
    """None, one, and around the ends of a run of 128 slots."""
    lens = [[0, 1, 2, 127, 128, 129, 255, 256, 257, 300]]
    p = problem(3, B=1, Hkv=10, T=1, S=0, lens=lens, first=0)
    got = check(prepared({**p, "stop": i32([0])}, fast=fast))
    assert got[0, 1, 0] == MOST


@pytest.mark.parametrize("seed", range(4))
def test_attention_equals_removal(seed):
    """With a row's attention as the score: the change of its output when the slot alone is removed (theorem A.2). In
    double, brute force subtracts two outputs: 1e-14 of their size and 1 / (1 - a)^2."""
    p = problem(seed, B=1, G=1, Hkv=1, T=1, S=0, D=40, lens=[[3 + 40 * seed]], first=0)
    a = torch.randn(3 + 40 * seed, dtype=torch.double).mul(2).softmax(0).float()  # oracle and op read the same numbers
    p = prepared({**p, "stop": i32([0])}, score=a.view(1, 1, -1))
    v = ref.alive(held_of(p), "v", 0, 0, p["v"][0, 0])
    hn = a.double() / a.double().sum()
    want = ref.removal(hn, v, 2)
    assert ((call(ref.refine, p)[0, 0] - want).abs() <= 1e-14 * v.norm(dim=1).max() / (1 - hn) ** 2).all()
    assert ((check(p)[0, 0] - want).abs() <= allowed(p, 0, 0)).all()


def test_all_of_the_mass():
    """More than 1 - 1e-6 of it ranks first; a little less is a number."""
    p, score = problem(4, B=1, Hkv=3, T=1, S=0, lens=[[5, 5, 1]], first=0), torch.zeros(1, 3, 5)
    score[0, 0, 2], score[0, 0, 4] = 1.0, 1e-7
    score[0, 1, 2], score[0, 1, 4] = 1.0, 1e-4
    got = check(prepared({**p, "stop": i32([0])}, score=score))
    assert (got == MOST).nonzero().tolist() == [[0, 0, 2], [0, 2, 0]]  # a slot alone has it all, even with a score of 0


@pytest.mark.parametrize("fast", [False, True])
def test_no_mass(fast):
    """As if all scores were alike; -0 is 0."""
    p = prepared(problem(5, lens=[[30, 200], [7, 1]]), fast=fast)
    p["score"] = -0.0 * p["score"].nan_to_num()
    zero = check(p)
    alike = call(ops.refine, {**p, "score": torch.ones_like(p["score"])})
    live = torch.arange(zero.shape[2]) < alive_counts(p)[..., None]
    assert torch.allclose(zero[live], alike[live], rtol=1e-5)


def test_error_does_not_grow_with_n():
    """Values far from 0, so that an error of their mean shows. A tenth of FP32: random roundings of the 128 terms of a
    run and of eleven levels above, sqrt(139) * 2^-24 = 7e-7. One running sum is off by three times that."""
    n = 200_003
    p = problem(6, B=1, G=1, Hkv=1, T=1, S=0, D=8, lens=[[n]], first=0)
    p["held_v"] += 100
    for fast in (False, True):
        check(prepared({**p, "stop": i32([0])}, fast=fast), share=0.1)


@pytest.mark.parametrize("bad", [NAN, INF])
def test_bad_scores_stay_in_their_head(bad):
    p = prepared(problem(7, lens=[[30, 200], [7, 9]], first=0))
    clean = call(ops.refine, p)
    p["score"][0, 1, 150] = bad
    got = call(ops.refine, p)
    assert got[0, 1, : alive_counts(p)[0, 1]].isnan().all() and (got[0, 1, alive_counts(p)[0, 1] :] == 0).all()
    got[0, 1] = clean[0, 1]
    assert same_bits(got, clean)


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads(dtype):
    p = prepared(problem(9, B=1, lens=[[3000, 1333]], dtype=dtype))
    assert same_for_threads(lambda: [call(ops.refine, p)])


WRONG = {  # beside what test_table.py gives every argument
    "columns under n": lambda p: {"score": p["score"][..., :-4].contiguous()},
    "v dtype": lambda p: {"v": p["v"].half()},
    "held_v dtype": lambda p: {"held_v": p["held_v"].double(), "v": p["v"].double()},
    "stop under first": lambda p: {"first": i32([4, 0]), "stop": i32([3, 0])},
    "len past the buffer": lambda p: {"held_len": i32([[3, 10**6], [0, 0]]), "score": torch.zeros(2, 2, 2 * 10**6)},
    "offset negative": lambda p: {"held_offset": p["held_offset"] - 10**9},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_errors(wrong):
    p = prepared(problem(11, lens=[[3, 1], [4, 2]], first=0, layout="dense"))
    refuses(ops.refine, check, p, WRONG[wrong])


def test_opcheck():
    p = prepared(problem(12))
    opcheck("refine", {**p, "score": p["score"].nan_to_num()})
