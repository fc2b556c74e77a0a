import itertools

import pytest
import ref
import torch
from helpers import FP32, call, close, opcheck, same_bits, same_for_threads
from op_cases.score import GROUP, REDUCE, TERM, check, prepared
from problems import DTYPES, NAN, alive_counts, fuzz, i32, matrix, of_matrix, problem, refuses

from kvevict.ops import _ops as ops


@of_matrix
def test_matches(case, dtype):
    p = matrix(case, dtype, T=17)
    check(prepared(p, causal=case % 2 == 0, reduce=REDUCE[case % 3]))


@pytest.mark.parametrize("seed", range(40))
def test_fuzz(seed):
    p = prepared(fuzz(seed), causal=seed % 2 == 0, reduce=REDUCE[seed % 3], extra=seed % 5)
    if seed % 4 > 1:  # a given lse is used as it is, whatever the scored columns sum to; strided, too
        p["lse"] = torch.randn(*p["q"].shape[:2], 2 * p["q"].shape[2])[..., : p["q"].shape[2]] + 4
    check(p)


@pytest.mark.parametrize("group", GROUP)
@pytest.mark.parametrize("reduce, term", [x for x in itertools.product(REDUCE, TERM) if x != ("max", "entropy")])
@pytest.mark.parametrize("seed", range(4))
def test_group_term_and_weight(seed, reduce, group, term):
    """Weights of either sign, rows far apart; cancellation is bounded by the largest sum of absolute values."""
    p = prepared(fuzz(100 + seed, G=[1, 2, 4, 8][seed]), causal=seed % 2 == 0, reduce=reduce)
    p |= {"group": group, "term": term}
    if reduce != "max":
        p["weight"] = torch.randn(*p["q"].shape[:2], p["q"].shape[2] + 5)[..., 5:]
    got, want = call(ops.score, p), call(ref.score, p)
    least = call(ref.score, {**p, "weight": p["weight"].abs()}).max() if reduce != "max" else 0.0
    close(got, want, 3 * FP32, least)  # squares double the error of a, and an entropy has ln a's too
    heads = torch.repeat_interleave(alive_counts(p), got.shape[1] // p["held_len"].shape[1], 1)
    assert (got[torch.arange(got.shape[2]) >= heads[..., None]] == 0).all()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("group", GROUP)
def test_defaults_of_weight_and_group(group, causal):
    """Weights of 1 change no bit; other groups reduce the scores of "none", and one head's mean is its score."""
    p = prepared({**problem(13, G=4, T=30), "group": group}, causal, "sum")
    got = call(ops.score, p)
    assert same_bits(got, call(ops.score, {**p, "weight": torch.ones(2, 8, 30)}))
    each = call(ops.score, {**p, "group": "none"}).unflatten(1, (2, 4))
    want = {"mean": each.mean(2), "sum": each.sum(2), "max": each.amax(2), "none": each.flatten(1, 2)}[group]
    close(got, want.double(), 1e-6)  # four numbers are added


def test_nan_weight():
    """It reaches the slots that its row sees, in its group."""
    p = prepared(problem(14, T=12, lens=[[30, 40], [5, 64]], first=0, layout="dense"), True, "sum")
    p |= {"stop": i32([12, 12]), "row_first": i32([0, 3]), "weight": torch.ones(2, 4, 12), "columns": 90}
    p["weight"][0, 1, 4], p["weight"][1, 3, 2] = NAN, NAN  # the second row does not observe
    got = check(p)
    assert got.isnan().sum() == 30 + 5 and got[0, 0, :35].isnan().all()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("reduce", REDUCE)
def test_many_blocks(causal, reduce):
    p = problem(1, B=1, Hkv=1, T=301, lens=[[777]], first=[5], dtype=torch.bfloat16)
    check(prepared({**p, "stop": i32([290]), "row_first": i32([7])}, causal, reduce))


@pytest.mark.parametrize("group", ["sum", "none"])
@pytest.mark.parametrize("reduce", REDUCE)
@pytest.mark.parametrize("G, R", [(3, 40), (5, 90)])
def test_heads_that_do_not_fill_a_tile(G, R, reduce, group):
    """64 rows are no whole number of steps of 3 or 5 heads."""
    p = problem(15, G=G, T=R, D=80, dtype=torch.bfloat16, lens=[[50, 200], [0, 260]], first=[0, 9])
    p |= {"stop": i32([R, R]), "row_first": i32([0, 5])}
    check({**prepared(p, True, reduce), "group": group})


@pytest.mark.parametrize("R, length", [(32, 96), (32, 97), (33, 95), (16, 47), (63, 64)])
@pytest.mark.parametrize("D, dtype", [(64, 1), (96, 2), (128, 1), (256, 2), (128, 0), (96, 0)])
def test_tile_edges(D, dtype, R, length):
    """One row or slot less and more than tiles of 16 to 128 hold, heads together and apart."""
    p = problem(12, B=1, Hkv=1, G=4, T=R, lens=[[length]], first=0, D=D, dtype=DTYPES[dtype])
    p |= {"stop": i32([R]), "row_first": i32([0])}
    check(prepared(p, True, "sum"))
    p = {**prepared(p, True, "max"), "group": "none"}
    close(call(ops.score, p), call(ref.score, p), 2 * FP32)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("reduce", REDUCE)
@pytest.mark.parametrize("lens, R, S", [(0, 1, 1), (1, 1, 0), (0, 5, 0), (2, 9, 1), (5, 1, 9), (70, 32, 40)])
def test_lengths(lens, R, S, causal, reduce):
    """More rows than slots too: the first rows then see nothing."""
    p = problem(2, lens=lens, T=R, S=S, first=0)
    check(prepared({**p, "stop": i32([S, S]), "row_first": i32([0, 0])}, causal, reduce))


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_lse_of_attend_is_lse_computed(dtype, sinks, softcap):
    """Rows of a chunk: attend's log-sum-exp equals the one that score would compute, sinks included."""
    p = problem(3, T=33, first=[0, 7], dtype=dtype, sinks=sinks, softcap=softcap, lens=[[9, 70], [0, 1]])
    p = prepared(p, True, "sum")
    p.update(stop=i32([33, 33]), row_first=i32([0, 7]))
    p["columns"] = 103
    computed = check(p)
    given = check({**p, "lse": call(ops.attend, {**p, "stop": None})[1]})
    close(given, computed.double(), 2 * FP32)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_sum_to_the_observing_rows(dtype, causal):
    """Each row's attention is 1 in all: a sum that no oracle of ours can get wrong."""
    p = prepared(problem(4, T=60, G=4, dtype=dtype, first=[0, 11], lens=[[100, 7], [33, 64]]), causal, "sum")
    p.update(stop=i32([60, 40]), row_first=i32([0, 45]))
    p["columns"] = 160
    total = call(ops.score, p).double().sum(-1)
    close(total, torch.tensor([[60.0, 60.0], [15.0, 15.0]], dtype=torch.double), FP32)


@pytest.mark.parametrize("reduce", REDUCE)
def test_no_row_observes(reduce):
    p = prepared(problem(5, T=9, layout="dense"), False, reduce)
    p["q"].fill_(NAN)
    assert (call(ops.score, {**p, "row_first": i32([9, 9])}) == 0).all()


@pytest.mark.parametrize("shape", [{"B": 0}, {"T": 0, "S": 0}, {"T": 0, "S": 5}])
def test_empty(shape):
    p = problem(14, lens=3, first=0, **shape)
    score = call(ops.score, {**p, "causal": True, "reduce": "mean", "columns": 9, "lse": None})
    assert score.shape == (p["q"].shape[0], 2, 9) and (score == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_padding_rows_are_not_read(dtype):
    p = prepared(problem(6, T=21, dtype=dtype, layout="dense"), False, "sum")
    p["row_first"] = i32([4, 20])
    p["q"][0, :, :4], p["q"][1, :, :20] = NAN, NAN
    assert check(p).isfinite().all()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_from_stop_on_are_not_read(dtype, causal):
    p = prepared(problem(13, T=9, S=40, dtype=dtype), causal, "sum")
    p["stop"] = torch.maximum(p["first"], i32([40, 11]))
    want = call(ops.score, p)
    p["k"][1, :, p["stop"][1] :] = NAN
    assert same_bits(check(p), want)


@pytest.mark.parametrize("reduce", REDUCE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_key(dtype, reduce):
    """With a finite lse only the key's column is NaN; with a computed one, each column of rows that see it."""
    p = prepared(problem(7, T=12, dtype=dtype, lens=[[30, 40], [5, 64]], first=0, layout="dense"), False, reduce)
    p["row_first"] = i32([0, 3])
    p["held_k"][p["held_offset"][1, 1] + 20] = NAN
    lse = torch.full((2, 4, 12), 5.0)
    assert check({**p, "lse": lse}).isnan().sum() == 1
    assert check(p).isnan().sum() == alive_counts(p)[1, 1]


def test_huge_logits():
    """Whole numbers, exact dot products: see test_attend.py for the tolerance."""
    p = prepared(problem(8, T=19, layout="dense"), True, "sum")
    for name in ("q", "k", "held_k"):
        p[name] = (p[name] * 16).round()
    p["scale"] = 0.5
    close(call(ops.score, p), call(ref.score, p), FP32 + 2.0**-22 * 20000)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_threads(dtype, causal, given):
    p = prepared(problem(9, B=1, G=4, T=300, lens=[[700, 333]], dtype=dtype), causal, "sum")
    p["lse"] = torch.randn(1, 8, 300) + 6 if given else None
    assert same_for_threads(lambda: [call(ops.score, p)])


def test_wider_output_changes_nothing():
    p = prepared(problem(10, T=9), True, "sum")
    wide = call(ops.score, {**p, "columns": p["columns"] + 50})
    assert same_bits(wide[..., : p["columns"]], call(ops.score, p))


WRONG = {  # beside what test_table.py gives every argument
    "mixed dtypes": lambda p: {"k": p["k"].half()}, "reduce": lambda p: {"reduce": "median"},
    "group": lambda p: {"group": "median"},
    "weight of a maximum": lambda p: {"reduce": "max", "weight": torch.ones(2, 4, 9)},
    "entropy of a maximum": lambda p: {"reduce": "max", "term": "entropy"},
    "weight shape": lambda p: {"weight": torch.ones(2, 2, 9)},
    "columns under n": lambda p: {"columns": int(alive_counts(p).max()) - 1},
    "columns negative": lambda p: {"columns": -1}, "row_first over R": lambda p: {"row_first": i32([0, 10])},
    "row_first negative": lambda p: {"row_first": i32([-1, 0])}, "row_first shape": lambda p: {"row_first": i32([0])},
    "stop under first": lambda p: {"first": i32([4, 0]), "stop": i32([3, 0])},
    "stop over S": lambda p: {"stop": i32([0, 10])}, "lse shape": lambda p: {"lse": torch.zeros(2, 4, 8)},
    "len past the buffer": lambda p: {"held_len": i32([[3, 10**6], [0, 0]]), "columns": 2 * 10**6},
    "len negative": lambda p: {"held_len": i32([[3, -1], [0, 0]])},
    "offset negative": lambda p: {"held_offset": p["held_offset"] - 10**9},
    "3 query heads on 2": lambda p: {"q": p["q"][:, :3]}, "head dimensions differ": lambda p: {"q": p["q"][..., :56]},
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_errors(wrong):
    p = prepared(problem(11, lens=[[3, 1], [4, 2]], first=0, layout="dense"), False, "sum")
    refuses(ops.score, check, p, WRONG[wrong])


@pytest.mark.parametrize("given", [True, False])
def test_opcheck(given):
    p, rows = prepared(problem(12), True, "sum"), torch.zeros(2, 4, 9)
    flags = {"reduce": 0, "group": 3 if given else 1, "term": given, "weight": rows if given else None}
    opcheck("score", {**p, **flags, "lse": rows if given else None})
