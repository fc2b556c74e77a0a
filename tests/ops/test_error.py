import pytest
import ref
import torch
from helpers import FP32, call, held_of, opcheck, same_bits, same_for_threads
from op_cases.error import GROUP, KINDS, check, prepared
from problems import DTYPES, INF, NAN, alive_counts, fuzz, i32, matrix, of_matrix, problem, refuses

from kvevict.ops import _ops as ops


@pytest.mark.parametrize("kind", KINDS)
@of_matrix
def test_matches(case, dtype, kind):
    check(prepared(matrix(case, dtype, T=17), kind, causal=case % 2 == 0, seed=case))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(30))
def test_fuzz(seed, kind):
    p = prepared(fuzz(seed), kind, seed % 2 == 0, seed // 2, seed % 5, group=GROUP[seed % 4], alpha=seed % 3 / 10)
    if seed % 4 > 1:  # a given lse, such that no weight is near 1
        p["lse"] = torch.randn(*p["q"].shape[:2], 2 * p["q"].shape[2])[..., : p["q"].shape[2]] + 8
    check(p)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lens, R, S", [(0, 1, 1), (1, 1, 0), (0, 5, 0), (2, 9, 1), (5, 1, 9), (70, 32, 40)])
def test_lengths(lens, R, S, causal, kind):
    """One slot alone has a weight of 1, where the denominator is 1e-6."""
    p = problem(2, lens=lens, T=R, S=S, first=0)
    check(prepared({**p, "stop": i32([S, S]), "row_first": i32([0, 0])}, kind, causal))


@pytest.mark.parametrize("kind", KINDS)
def test_many_blocks(kind):
    p = problem(1, B=1, Hkv=1, G=4, T=70, lens=[[777]], first=[5], dtype=torch.bfloat16)
    check(prepared({**p, "stop": i32([68]), "row_first": i32([2])}, kind, True))


@pytest.mark.parametrize("kind", KINDS)
def test_output_with_strides(kind):
    """The last stride may be anything: such rows are copied."""
    p = prepared(problem(5, T=8), kind, True)
    want = call(ops.error, p)
    wide = torch.full((2, 8, 4, 128), NAN)
    wide[..., ::2] = p["o"]
    assert same_bits(call(ops.error, {**p, "o": wide[..., ::2]}), want)
    assert same_bits(call(ops.error, {**p, "o": p["o"].transpose(1, 2).contiguous().transpose(1, 2)}), want)


@pytest.mark.parametrize("kind, norm", [("l1", 1), ("l2", 2)])
@pytest.mark.parametrize("seed", range(6))
def test_one_row_equals_removal(seed, kind, norm):
    """Removing slot i alone and renormalising the row's attention moves its output by exactly this (EDIE eq. 7, CAOTE
    theorem A.2). Both sides cancel: the op's error is a / (1 - a)^2 times the rounding of v and o, brute force in
    double subtracts two outputs."""
    p = fuzz(seed, B=1, G=1, Hkv=1, T=1, S=0, lens=[[2 + 9 * seed]], dtype=torch.float32, sinks=False)
    p |= {"row_first": i32([0]), "stop": i32([0]), "causal": False, "kind": kind, "columns": 2 + 9 * seed}
    ((*_, a, _),) = call(ref.observed, {**p, "lse": None})
    v = ref.alive(held_of(p), "v", 0, 0, p["v"][0, 0])
    want, o = ref.removal(a[0], v, norm), a[0] @ v
    allowed = (v.norm(p=norm, dim=1) + o.norm(p=norm)) / (1 - a[0]) ** 2
    exact = call(ref.error, {**p, "o": o.view(1, 1, 1, -1)})[0, 0]
    assert ((exact - want).abs() <= 1e-14 * allowed).all()
    got = call(ops.error, {**p, "o": o.float().view(1, 1, 1, -1)})[0, 0]
    assert ((got - want).abs() <= FP32 * a[0] * allowed).all()


@pytest.mark.parametrize("seed", range(20))
def test_edie_is_a_bound(seed):
    """EDIE eq. 8: by the triangle inequality it is never below eq. 7, up to the rounding of both."""
    p = prepared(fuzz(seed), "edie", seed % 2 == 0, 0, alpha=0.0)
    bound, exact = call(ref.error, p), call(ref.error, {**p, "kind": "l1"})
    assert (bound >= exact).all() and (bound > exact).any() == (exact > 0).any()
    exact = call(ops.error, {**p, "kind": "l1"})
    assert (call(ops.error, p) >= exact * (1 - FP32)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_with_what_attend_leaves(kind, dtype):
    """The window of a chunk: its rows of out and lse are views."""
    p = problem(3, G=4, T=40, dtype=dtype, lens=[[9, 70], [0, 300]], first=[0, 7])
    out, lse = call(ops.attend, {**p, "stop": None})
    p |= {"q": p["q"][:, :, -8:], "stop": i32([40, 40]), "row_first": i32([0, 0]), "pos": None}
    p = prepared(p, kind, True, o=out[:, -8:], lse=lse[:, :, -8:])
    assert not p["o"].is_contiguous() and not p["lse"].is_contiguous()
    check(p)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [NAN, INF])
def test_bad_numbers_reach_what_sees_them(kind, bad):
    p = problem(7, T=12, lens=[[30, 40], [5, 64]], first=0, layout="dense")
    p = prepared({**p, "stop": i32([12, 12]), "row_first": i32([0, 3])}, kind, True, 1)
    value, output, weight = ({**p, x: p[x].clone()} for x in ("held_v", "o", "weight"))
    value["held_v"][p["held_offset"][1, 1] + 20, 3] = bad
    assert (~check(value).isfinite()).sum() == 1
    output["o"][0, 4, 3, 5] = bad  # a row of head 3; it sees 40 + 5 slots
    assert (~check(output).isfinite()).sum() == 45
    output["o"][1, 2] = bad  # does not observe
    assert (~check(output).isfinite()).sum() == 45
    weight["weight"][0, 3, 4] = NAN
    assert check(weight).isnan().sum() == 45


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", [True, False])
def test_threads(kind, given):
    p = problem(9, B=1, G=4, T=100, lens=[[700, 333]], dtype=torch.float16)
    p = prepared(p, kind, True, lse=torch.randn(1, 8, 100) + 6 if given else None)
    assert same_for_threads(lambda: [call(ops.error, p)])


WRONG = {  # beside what test_table.py gives every argument
    "kind": lambda p: {"kind": "l3"}, "group": lambda p: {"group": "median"},
    "alpha negative": lambda p: {"alpha": -0.1}, "o of attend's other layout": lambda p: {"o": p["o"].transpose(1, 2)},
    "o dtype": lambda p: {"o": p["o"].half()}, "v dtype": lambda p: {"v": p["v"].half()},
    "v shape": lambda p: {"v": p["v"][:, :, 1:]}, "held_v shorter than held_k": lambda p: {"held_v": p["held_v"][1:]},
    "weight shape": lambda p: {"weight": torch.ones(2, 4, 8)},
    "columns under n": lambda p: {"columns": int(alive_counts(p).max()) - 1},
    "row_first over R": lambda p: {"row_first": i32([0, 10])},
    "len past the buffer": lambda p: {"held_len": i32([[3, 10**6], [0, 0]]), "columns": 2 * 10**6},
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_errors(wrong):
    p = prepared(problem(11, lens=[[3, 1], [4, 2]], first=0, layout="dense"), "l1", False)
    refuses(ops.error, check, p, WRONG[wrong])


@pytest.mark.parametrize("given", [True, False])
def test_opcheck(given):
    p, rows = prepared(problem(12), "l2", True), torch.zeros(2, 4, 9)
    opcheck("error", {**p, "kind": 2, "group": 3 if given else 0, "lse": rows if given else None,
                      "weight": rows if given else None})  # fmt: skip
