"""attend_score, attend_error and attend_peak: bit by bit the ops that they stand for, one after the other; and within
rounding what float64 says."""

import pytest
import ref
import torch
from helpers import FP32, call, close, opcheck, same_bits, same_for_threads
from op_cases.attend_score import OF, apart, check, prepared
from problems import DTYPES, NAN, fuzz, i32, matrix, of_matrix, problem, refuses

from kvevict.ops import _ops as ops


@of_matrix
def test_matches(case, dtype):
    """Shapes for which attend packs keys, so that its logits are kept; some rows, or all, observe."""
    for of, observers in (("score", 70), ("error", 20), ("peak", 33)):
        p = matrix(case, dtype, T=70)
        check(prepared({**p, "stop": i32([p["k"].shape[2]] * 2)}, observers, of, seed=case), of)


@pytest.mark.parametrize("of", OF)
@pytest.mark.parametrize("seed", range(40))
def test_fuzz(seed, of):
    """Anything at all, most of it too short to keep logits."""
    p = fuzz(seed)
    check(prepared(p, [p["q"].shape[2], p["q"].shape[2] // 2][seed % 2], of, seed=seed, causal=seed % 5 > 0), of)


@pytest.mark.parametrize("of", OF)
@pytest.mark.parametrize("seed", range(24))
def test_fuzz_of_long_chunks(seed, of):
    """Ragged heads and padding; 3, 5 and 7 heads do not fill a tile of 48 rows."""
    p = fuzz(seed, T=[65, 97, 130, 200][seed % 4], G=[1, 2, 3, 4, 5, 7, 8, 49][seed % 8])
    T = p["q"].shape[2]
    p["stop"] = torch.maximum(p["first"], i32(p["k"].shape[2] - seed % 3))
    more = {"group": ["sum", "mean", "max", "none"][seed // 4 % 4]} if of != "peak" else {}
    if of == "score":
        more |= {"term": ["a", "square", "entropy"][seed // 3 % 3], "reduce": ["sum", "mean"][seed % 2]}
    check(prepared(p, [T, 1, 32, T - 5][seed // 2 % 4], of, seed=seed, **more), of)


def test_against_the_oracle():
    for seed, of in enumerate(OF):
        p = fuzz(50 + seed, T=90, G=3, dtype=torch.float32, D=64, S=90)
        p = prepared({**p, "stop": i32([90] * len(p["first"]))}, 50, of, seed=seed + 1)
        for got, want in zip(check(p, of), call(getattr(ref, f"attend_{of}"), {**p, "stop": p["stop"]}), strict=True):
            close(got, want, 4 * FP32, least=1.0)


def long(dtype=torch.bfloat16, T=301, **more):
    """Longer than any block of rows or keys, and a multiple of none."""
    return problem(1, B=1, Hkv=1, G=4, T=T, lens=[[777]], first=[5], dtype=dtype, **more)


@pytest.mark.parametrize("reduce", ["sum", "max"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_blocks(dtype, reduce):
    check(prepared({**long(dtype), "stop": i32([301])}, 290, reduce=reduce))


@pytest.mark.parametrize("of", OF)
@pytest.mark.parametrize("sinks", [False, True])
def test_softcap_and_sinks(sinks, of):
    p = {**long(torch.float32, T=120, softcap=2.0, sinks=sinks), "stop": i32([120])}
    check(prepared(p, 100, of), of)


@pytest.mark.parametrize("D", [8, 40, 256])
def test_head_dimensions(D):
    check(prepared({**long(T=120, D=D), "stop": i32([120])}, 120))


@pytest.mark.parametrize("span", [0, 4, 300, 2000])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_span(dtype, sinks, span):
    """KVzip's rows: 100 rows after a chunk of 101, of which no slot is scored, and of which the last lse is over the
    head's first `span` slots, the chunk and the rows."""
    p = problem(3, G=3, T=201, lens=[[0, 777], [3, 260]], first=[0, 50], dtype=dtype, sinks=sinks)
    p = prepared({**p, "stop": i32([101, 101])}, 100, causal=False, reduce="max", group="max", span=span)
    got, want = check(p), call(ref.attend_score, p)
    close(got[2], want[2], 4 * FP32, least=1.0)


@pytest.mark.parametrize("observers", [4, 40])
def test_span_of_few_rows(observers):
    """Their attend cuts columns into splits, and so does its lse here."""
    p = problem(3, G=3, T=201, lens=[[0, 7770], [3, 260]], first=[0, 50])
    check(prepared({**p, "stop": i32([201 - observers] * 2)}, observers, causal=False, reduce="max", span=4))


def test_rows_that_see_more_than_in_attend():
    """Rows that are not causal may observe later slots than those that they attend to: two passes."""
    p = prepared({**long(), "stop": i32([301])}, 200, causal=False, reduce="sum")
    got = check(p)
    assert (got[2][0, 0, 777 + 200 : -3] > 0).all()


@pytest.mark.parametrize("T, observers", [(0, 0), (1, 0), (1, 1), (90, 0), (90, 1), (200, 200)])
@pytest.mark.parametrize("of", OF)
def test_lengths(of, T, observers):
    for lens in (0, [[0, 1], [600, 257]]):
        p = problem(2, G=2, T=T, lens=lens, first=0)
        check(prepared({**p, "stop": i32([T, T])}, observers, of), of)


def test_nan():
    """A NaN in a key or a query reaches the slots and rows that the ops apart let it reach, and no others."""
    for where, of in (("k", "score"), ("q", "score"), ("v", "error")):
        p = prepared({**long(torch.float32, layout="dense"), "stop": i32([301])}, 301, of)
        p[where][0, 0, 100] = NAN
        one, other = call(OF[of], p), apart(p, of)
        assert one[0].isnan().any()  # the output; which other results it reaches depends on `where`
        for x, y in zip(one, other, strict=True):
            assert torch.equal(x.isnan(), y.isnan()) and torch.equal(x.nan_to_num(), y.nan_to_num())


@pytest.mark.parametrize("of", OF)
def test_same_bits_for_any_number_of_threads(of):
    """Four heads of ragged lengths, and enough rows for several waves of tasks."""
    p = problem(5, B=2, Hkv=2, G=3, T=400, lens=[[900, 30], [0, 511]], first=[0, 90], dtype=torch.bfloat16)
    p = prepared({**p, "stop": i32([400, 400])}, 380, of)
    assert same_for_threads(lambda: call(OF[of], p))


def test_scratch_is_bounded():
    """So many heads a group that the totals of tiles fill several waves."""
    p = problem(6, B=1, Hkv=1, G=48, T=100, lens=[[3000]], first=0, D=8)
    check(prepared({**p, "stop": i32([100])}, 100))


def test_all_rows_that_observe():
    """Sums over the columns are 1 for every row: no oracle of ours can get that wrong."""
    p = prepared({**long(T=200), "stop": i32([200])}, 200, reduce="sum")
    close(call(ops.attend_score, p)[2].sum(-1), torch.full((1, 1), 195.0).double(), 1e-5)


@pytest.mark.parametrize("of", OF)
def test_opcheck(of):
    p = prepared({**problem(7, T=5, first=0), "stop": i32([5, 5])}, 3, of, seed=1)
    words = dict(reduce=["sum", "mean", "max"], kind=["edie", "l1", "l2"], group=["sum", "mean", "max", "none"])
    words |= dict(term=["a", "square", "entropy"])
    p |= {name: each.index(p.get(name, each[0])) for name, each in words.items()}
    opcheck(f"attend_{of}", {"softcap": 0.0, "span": -1, "alpha": 0.0, **p})


def test_errors():
    p = prepared({**problem(8, T=70, first=0), "stop": i32([70, 70])}, 40)
    for change in (
        {"observers": 71}, {"row_first": i32([41, 0])}, {"stop": i32([71, 3])}, {"columns": 70},
        {"weight": torch.ones(2, 4, 39)}, {"span": -2}, {"reduce": "none"},
    ):  # fmt: skip
        refuses(ops.attend_score, check, p, lambda p, change=change: change)


def test_same_bits_twice():
    p = prepared({**long(), "stop": i32([301])}, 301)
    assert all(same_bits(*pair) for pair in zip(call(ops.attend_score, p), call(ops.attend_score, p), strict=True))
