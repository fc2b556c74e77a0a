import os
import subprocess
import sys

import fuzzing
import problems
import pytest
import ref
import torch
from helpers import FP32, OUT, call, close, opcheck, same_for_threads
from op_cases.attend import check, fuzz, matrix, problem
from problems import DTYPES, INF, NAN, i32, of_matrix, refuses

from kvevict.ops import _ops as ops


@of_matrix
def test_matches(case, dtype):
    check(matrix(case, dtype, T=17))


@pytest.mark.parametrize("seed", range(40))
def test_fuzz(seed):
    check(fuzz(seed))


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_blocks(dtype):
    """Longer than any block of rows or keys, and a multiple of none."""
    check(problem(1, B=1, Hkv=1, T=301, lens=[[777]], first=[5], dtype=dtype, D=64))


@pytest.mark.parametrize("T, length", [(32, 96), (32, 97), (33, 95), (16, 47), (63, 64)])
@pytest.mark.parametrize("D, dtype", [(64, 1), (96, 2), (128, 1), (256, 2), (128, 0)])
def test_tile_edges(D, dtype, T, length):
    """One row or key less and more than tiles of 32, 64 and 128 hold."""
    check(problem(12, B=1, Hkv=1, G=4, T=T, lens=[[length]], first=0, D=D, dtype=DTYPES[dtype]))


@pytest.mark.parametrize(
    "lens, T, S", [(0, 1, 1), (1, 1, 1), (1, 1, 0), (0, 7, 7), (5, 1, 9), (5, 9, 1), (64, 64, 64), (3, 9, 0)]
)
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_lengths(lens, T, S, dtype):
    check(problem(2, lens=lens, T=T, S=S, first=0, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_see_nothing(dtype):
    """Left padding over an empty cache: 0 and -inf, not NaN, though every padding row holds NaN."""
    p = problem(3, T=20, lens=[[0, 4], [0, 0]], first=[13, 20], dtype=dtype)
    out, lse = check(p)
    blind = torch.zeros(2, 20, 4, dtype=torch.bool)
    blind[0, :13, :2] = blind[1] = True
    lse = lse.transpose(1, 2)
    assert (out[blind] == 0).all() and (lse[blind] == -INF).all() and lse[~blind].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", range(8))
def test_matches_not_causal(case, dtype):
    check(problems.matrix(case, dtype, T=[1, 17, 40][case % 3], S=[33, 17, 5, 0][case % 4]))


@pytest.mark.parametrize("seed", range(40))
def test_fuzz_not_causal(seed):
    check(problems.fuzz(seed))


@pytest.mark.parametrize("dtype", DTYPES)
def test_not_causal(dtype):
    """Rows see one another's columns up to stop, and no more: a row alone gets the same, and beyond all is NaN. A batch
    row without a slot gets 0 and -inf."""
    p = {**problem(13, T=70, S=300, lens=[[9, 130], [0, 0]], first=[3, 7], dtype=dtype), "stop": i32([290, 7])}
    for b in range(2):
        p["k"][b, :, p["stop"][b] :], p["v"][b, :, p["stop"][b] :] = NAN, NAN
    out, lse = check(p)
    alone, alone_lse = check({**p, "q": p["q"][:, :, 40:41]})
    close(alone, out[:, 40:41].double(), 2 * OUT[dtype])  # both are rounded
    close(alone_lse, lse[:, :, 40:41].double(), FP32)
    assert lse[0].isfinite().all() and (lse[1] == -INF).all() and (out[1] == 0).all()


@pytest.mark.parametrize("softcap", [0.0, 0.7, 30.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_softcap_and_sinks(softcap, sinks, dtype):
    check(problem(4, G=4, T=33, softcap=softcap, sinks=sinks, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_huge_logits(dtype):
    """Whole numbers with exact dot products, up to some 20000 after scaling: only exp and its argument round."""
    p = problem(5, T=19, dtype=dtype, layout="dense", first=[0, 3], lens=[[40, 0], [7, 33]])
    for name in ("q", "k", "held_k"):
        p[name] = (p[name] * 16).round()
    p["scale"] = 0.5
    (out, lse), (want, want_lse) = call(ops.attend, p), call(ref.attend, p)
    largest = want_lse.abs().max().item()
    assert largest > 1000
    close(lse, want_lse, 2.0**-22)  # one rounding of the logit and one of log2(e), relative to the logit itself
    close(out, want, OUT[dtype] + 2.0**-22 * largest)  # times the logit: the weights' relative error


@pytest.mark.parametrize("where", ["held_k", "held_v", "k", "v"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_reaches_only_rows_that_see_it(where, dtype):
    p = problem(6, T=20, dtype=dtype, lens=[[9, 30], [17, 5]], first=[0, 2], layout="dense")
    if where.startswith("held"):
        p[where][p["held_offset"][0, 1] + 3] = NAN
    else:
        p[where][0, 1, 11] = NAN
    out, _ = check(p)
    assert out[0, 12:, 2:].isnan().all() and out[0, :, :2].isfinite().all() and out[1].isfinite().all()
    assert where.startswith("held") or out[0, :11].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_query_stays_in_its_row(dtype):
    p = problem(7, T=21, dtype=dtype, lens=[[9, 30], [17, 5]], first=0, layout="dense")
    p["q"][1, 2, 5] = NAN
    out, _ = check(p)
    assert out.isnan().any(-1).sum() == 1


@pytest.mark.parametrize("shape", [{"B": 0}, {"T": 0, "S": 0}, {"T": 0, "S": 5}])
def test_empty(shape):
    p = problem(8, lens=3, **shape)
    out, lse = call(ops.attend, p)
    assert out.shape == (p["q"].shape[0], p["q"].shape[2], 4, 64) and lse.shape == p["q"].shape[:3]


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads(dtype):
    p = problem(9, B=1, G=4, T=300, lens=[[700, 333]], dtype=dtype)
    assert same_for_threads(lambda: call(ops.attend, p))


@pytest.mark.parametrize("T, G", [(1, 3), (3, 5), (7, 4), (40, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_few_rows_on_many_slots(dtype, T, G):
    """Their columns are cut into splits; some heads have no or few columns."""
    p = problem(10, B=1, G=G, Hkv=3, T=T, S=T + 2, first=2, lens=[[5003, 0, 777]], dtype=dtype, sinks=G == 3)
    p["stop"] = None
    check(p)
    assert same_for_threads(lambda: call(ops.attend, p))


ROWS = ("q", "k", "v", "held_k", "held_v")
WRONG = {  # beside what test_table.py gives every argument
    "mixed dtypes": lambda p: {"held_k": p["held_k"].half()}, "sinks length": lambda p: {"sinks": torch.zeros(3)},
    "head dimensions differ": lambda p: {"q": p["q"][..., :56]},
    "head dimension 60": lambda p: {n: p[n][..., :60].contiguous() for n in ROWS},
    "head dimension 520": lambda p: {n: p[n].repeat_interleave(9, -1)[..., :520].contiguous() for n in ROWS},
    "3 query heads on 2": lambda p: {"q": p["q"][:, :3]}, "batch differs": lambda p: {"k": p["k"][:1]},
    "v shorter than k": lambda p: {"v": p["v"][:, :, :-1]},
    "held_v shorter than held_k": lambda p: {"held_v": p["held_v"][:-1]},
    "len shape": lambda p: {"held_len": p["held_len"][:, :1]},
    "offset shape": lambda p: {"held_offset": p["held_offset"][:1]}, "first shape": lambda p: {"first": p["first"][:1]},
    "first negative": lambda p: {"first": i32([-1, 0])}, "first over S": lambda p: {"first": i32([0, 10])},
    "stop shape": lambda p: {"stop": i32([9])}, "stop over S": lambda p: {"stop": i32([0, 10])},
    "stop under first": lambda p: {"first": i32([4, 0]), "stop": i32([3, 0])},
    "len negative": lambda p: {"held_len": i32([[3, -1], [0, 0]])},
    "len past the buffer": lambda p: {"held_len": i32([[3, 10**6], [0, 0]])},
    "offset negative": lambda p: {"held_offset": p["held_offset"] - 10**9},
    "offset past the buffer": lambda p: {"held_offset": p["held_offset"] + 10**12},
    "offset overflows": lambda p: {"held_offset": p["held_offset"] * 0 + 2**63 - 2},
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_errors(wrong):
    refuses(ops.attend, check, problem(10, lens=[[3, 1], [4, 2]], first=0, layout="dense"), WRONG[wrong])


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(dtype):
    opcheck("attend", problem(11, dtype=dtype, sinks=True, first=[0, 2]))
    opcheck("attend", problems.problem(11, dtype=dtype, first=[0, 2]))


OWN = ops.cpu_isa()  # every other test runs on it
# The gate's draw of three cases a test: every dtype, kind of packed slots and head dimension is in it.
DRAWN = {"KVEVICT_MOST": "3", "KVEVICT_SEED": "329"}
EVERY = ("(8, 8)", "(8, 4)", "(4, 4)", "(0, 8)", "(4, 0)", "dtype0", "dtype1", "dtype2")


@pytest.mark.slow
@pytest.mark.parametrize(
    "isa", [pytest.param(isa, marks=[pytest.mark.nightly] * (isa == OWN)) for isa in ops._C.cpu_isas().split()]
)
def test_isa(isa):
    """Three drawn cases of each test of an op, nightly six, in a process: the instruction set is chosen once."""
    here = os.path.dirname(__file__)
    code = (
        "import sys, pytest; from kvevict.ops import _ops; print(_ops.cpu_isa()); sys.exit(pytest.main(sys.argv[1:]))"
    )
    options = ["-v", "-x", "-n0", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    command = [sys.executable, "-c", code, here, *options, "-k", "test_matches or test_many_blocks"]
    draw = {"KVEVICT_MOST": "6"} if fuzzing.NIGHTLY else DRAWN
    env = {**os.environ, **draw, "KVEVICT_CPU_ISA": isa, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:] + done.stderr[-1000:]
    assert fuzzing.NIGHTLY or all(each in done.stdout for each in EVERY)
    if isa in ("avx2", "scalar"):  # of the others torch does not tell whether the processor has them
        vectors = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
        assert done.stdout.splitlines()[0] == (isa if vectors else "scalar")
