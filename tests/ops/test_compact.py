import pytest
import torch
from helpers import call, opcheck, same_bits
from op_cases.compact import DST, check, prepared
from problems import DTYPES, copied, fuzz, i32, matrix, of_matrix, problem, refuses

from kvevict.ops import _ops as ops


@of_matrix
def test_matches(case, dtype):
    check(prepared(matrix(case, dtype, T=17), case))


@pytest.mark.parametrize("seed", range(40))
def test_fuzz(seed):
    check(prepared(fuzz(seed), seed))


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_an_index_the_first_slots_move(dtype):
    p = prepared(problem(1, dtype=dtype, first=[2, 0]), 1)
    p["index"] = None
    check(p)


@pytest.mark.parametrize("kept", [lambda n: n, lambda n: n // 2, lambda n: n.clamp(max=1), lambda n: n * 0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_in_place_equals_out_of_place(dtype, kept):
    p = problem(2, T=20, dtype=dtype, room=20, first=[0, 5])
    out_of_place, in_place = prepared(p, 2, kept), prepared(p, 2, kept)
    call(ops.compact, out_of_place)
    before = copied(p, "held_k", "held_v", "held_pos")
    in_place.update(dst_k=p["held_k"], dst_v=p["held_v"], dst_pos=p["held_pos"], dst_offset=p["held_offset"])
    call(ops.compact, in_place)
    untouched = torch.ones(p["held_k"].shape[0], dtype=torch.bool)
    for b in range(2):
        for h in range(2):
            n, to, at = int(in_place["keep"][b, h]), int(out_of_place["dst_offset"][b, h]), int(p["held_offset"][b, h])
            untouched[at : at + n] = False
            for name in DST:
                assert same_bits(in_place[name][at : at + n], out_of_place[name][to : to + n])
    for name in ("held_k", "held_v", "held_pos"):
        assert same_bits(p[name][untouched], before[name][untouched])


def wrong_index(p, column, value):
    index = p["index"].clone()
    index[0, 0, column] = value
    return {"index": index}


WRONG = {  # beside what test_table.py gives every argument
    "k dtype": lambda p: {"k": p["k"].half()}, "dst dtype": lambda p: {"dst_k": p["dst_k"].half()},
    "dst head dimension": lambda p: {"dst_k": p["dst_k"][:, :32].contiguous()},
    "pos shape": lambda p: {"pos": p["pos"][:, :-1]},
    "dst_pos shorter than dst_k": lambda p: {"dst_pos": p["dst_pos"][:-1]},
    "keep over n": lambda p: {"keep": p["keep"] * 0 + 13, "index": torch.arange(13).int().repeat(2, 2, 1)},
    "keep over n, no index": lambda p: {"keep": p["keep"] * 0 + 13, "index": None},
    "keep over the index": lambda p: {"index": p["index"][..., :4].contiguous()},
    "keep over an empty index": lambda p: {"index": p["index"][..., :0].contiguous()},
    "keep negative": lambda p: {"keep": p["keep"] * 0 - 1}, "index over n": lambda p: wrong_index(p, 5, 12),
    "index negative": lambda p: wrong_index(p, 0, -1), "index not ascending": lambda p: wrong_index(p, 1, 10),
    "index repeats": lambda p: wrong_index(p, 1, int(p["index"][0, 0, 0])),
    "dst past the buffer": lambda p: {"dst_offset": p["dst_offset"] + p["dst_k"].shape[0]},
    "dst offset negative": lambda p: {"dst_offset": p["dst_offset"] - 1000},
    "src past the buffer": lambda p: {"src_offset": p["src_offset"] + p["src_k"].shape[0]},
    "first over S": lambda p: {"first": i32([0, 10])},
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_errors(wrong):
    """And nothing is written before the error."""
    p = prepared(problem(3, T=9, lens=3, first=0, layout="dense"), 3, lambda n: n * 0 + 6, room=20)
    refuses(ops.compact, check, p, WRONG[wrong], DST)


@pytest.mark.parametrize("with_index", [True, False])
def test_opcheck(with_index):
    p = prepared(problem(4), 4)
    opcheck("compact", p if with_index else {**p, "index": None})
