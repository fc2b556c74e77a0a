import pytest
import torch
from helpers import call, opcheck, same_for_threads
from op_cases.select import check, drawn
from problems import INF, NAN, i32, refuses

from kvevict.ops import _ops as ops


@pytest.mark.quick(seed=0)
@pytest.mark.parametrize("ties", [True, False])
@pytest.mark.parametrize("seed", range(60))
def test_matches(seed, ties):
    check(drawn(seed, ties=ties))


@pytest.mark.parametrize("kept", ["none", "one", "all but one", "all"])
@pytest.mark.parametrize("seed", range(3))
def test_keep_at_its_ends(seed, kept):
    p = drawn(seed, C=130, protect=False)
    n = p["n"]
    p["keep"] = {"none": n * 0, "one": n.clamp(max=1), "all but one": (n - 1).clamp(min=0), "all": n}[kept].contiguous()
    p["columns"] = 130
    check(p)


def single(score, n, keep, columns):
    """One batch row, nothing protected."""
    return {
        "score": score, "n": i32([n]), "keep": i32([keep]), "columns": columns,
        "protect_first": i32([0]), "protect_last": i32([0]),
    }  # fmt: skip


def test_order_of_special_values():
    """NaN under -inf, -0 beside +0, equal scores by slot; one kept more each time."""
    score = torch.tensor([[[NAN, -INF, 0.0, -0.0, 5.0, NAN, -INF, 5.0, INF, 0.0]]])
    best = [8, 4, 7, 2, 3, 9, 1, 6, 0, 5]
    for keep in range(11):
        index = call(ops.select, single(score, [10], [keep], 10))
        assert index.flatten().tolist() == sorted(best[:keep]) + [-1] * (10 - keep)


@pytest.mark.parametrize("value", [0.0, NAN, INF, -INF])
def test_all_equal_keeps_the_first(value):
    index = check(single(torch.full((1, 2, 1000), value), [1000, 999], [300, 1], 300))
    assert index[0, 0].tolist() == list(range(300))


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_protected_scores_are_not_read(poison):
    p = drawn(5, C=65, ties=False, protect=False)
    p.update(n=i32([[65, 60, 9]] * 2), keep=i32([[20, 12, 9]] * 2), columns=20)
    p.update(protect_first=i32([4, 0]), protect_last=i32([5, 8]))
    want = check(p)
    for b in range(2):
        for h in range(3):
            n = int(p["n"][b, h])
            p["score"][b, h, : p["protect_first"][b]] = poison
            p["score"][b, h, n - int(p["protect_last"][b]) :] = poison
    assert torch.equal(call(ops.select, p), want)


def test_protected_slots_beyond_the_score():
    """n may exceed C where all that lies beyond is protected."""
    p = drawn(6, C=50, ties=False, protect=False)
    p.update(n=i32([[58, 50, 52]] * 2), keep=i32([[20, 8, 52]] * 2), columns=52, protect_last=i32([8, 8]))
    index = check(p)
    assert index[0, 0, 12:20].tolist() == list(range(50, 58))


@pytest.mark.parametrize("ties", [True, False])
def test_long(ties):
    check(drawn(7, B=1, C=20000, ties=ties))


def test_threads():
    p = drawn(9, Hkv=8, C=5000)
    assert same_for_threads(lambda: [call(ops.select, p)])


WRONG = {  # beside what test_table.py gives every argument
    "n shape": lambda p: {"n": p["n"][:, :2]}, "n negative": lambda p: {"n": p["n"] - 1000},
    "n over C": lambda p: {"n": p["n"] + 1000}, "keep over n": lambda p: {"keep": p["n"] + 1, "columns": 1000},
    "keep over columns": lambda p: {"keep": p["n"], "columns": int(p["n"].max()) - 1},
    "keep negative": lambda p: {"keep": p["keep"] * 0 - 1},
    "keep under the protected": lambda p: {"protect_first": i32([5, 5]), "keep": p["keep"] * 0 + 4},
    "protect_first negative": lambda p: {"protect_first": i32([-1, 0])},
    "protect_last negative": lambda p: {"protect_last": i32([-1, 0])},
    "protect_first shape": lambda p: {"protect_first": i32([0])},
    "protection overflows": lambda p: {"protect_first": i32([2**31 - 1] * 2), "protect_last": i32([2**31 - 1] * 2)},
    "columns negative": lambda p: {"columns": -1},
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_errors(wrong):
    p = drawn(10, C=40, protect=False)
    p.update(n=i32([[40, 30, 20]] * 2), keep=i32([[10, 10, 10]] * 2), columns=10)
    refuses(ops.select, check, p, WRONG[wrong])


def test_opcheck():
    opcheck("select", drawn(11))
