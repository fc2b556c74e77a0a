import pytest
import torch
from helpers import ERRORS, guarded, opcheck, same_bits, same_for_threads
from op_cases.linear import check, drawn
from problems import DTYPES

from kvevict.ops import _ops as ops


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "B, T, N, K",
    [(1, 1, 64, 32), (2, 1, 65, 64), (1, 3, 7, 96), (4, 4, 200, 576), (1, 17, 130, 160), (3, 11, 63, 2048)],
)
def test_matches(B, T, N, K, bias, dtype):
    check(drawn(B, T, N, K, dtype, bias))


@pytest.mark.parametrize("seed", range(30))
def test_fuzz(seed):
    generator = torch.Generator().manual_seed(seed)
    B, T, N, K = (int(torch.randint(1, most, (), generator=generator)) for most in (6, 8, 300, 20))
    check(drawn(B, T, N, 32 * K, DTYPES[seed % 3], seed % 2 == 0, seed))


@pytest.mark.parametrize("B, T, N, K", [(0, 1, 64, 32), (1, 0, 64, 32), (1, 1, 0, 32), (2, 1, 70, 0), (2, 1, 3, 0)])
def test_no_rows_outputs_or_numbers(B, T, N, K):
    for dtype in DTYPES:
        check(drawn(B, T, N, K, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_others(dtype):
    p = drawn(21, 1, 150, 288, dtype)
    alone = [ops.linear(**{**p, "x": p["x"][row : row + 1]}) for row in range(21)]
    assert same_bits(torch.cat(alone), check(p))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_stays_in_its_row_and_output(dtype):
    p = drawn(5, 1, 100, 64, dtype)
    p["x"][3, 0, 60], p["weight"][70, 3] = torch.nan, torch.nan
    wrong = ops.linear(**p).isnan()[:, 0]
    assert wrong[3].all() and wrong[:, 70].all() and wrong.sum() == 100 + 4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N", [5, 64, 65, 127])
def test_nothing_past_the_weights_is_read(N, dtype):
    p = drawn(2, 1, N, 96, dtype)
    check({"x": guarded(p["x"].contiguous()), "weight": guarded(p["weight"]), "bias": guarded(p["bias"])})


def test_threads():
    for dtype in DTYPES:
        p = drawn(4, 1, 3000, 96, dtype)
        assert same_for_threads(lambda p=p: [check(p)])


WRONG = {  # beside what test_table.py gives every argument
    "K is not a multiple of 32": lambda p: {"x": p["x"][..., :40], "weight": p["weight"][:, :40].contiguous()},
    "rows of another width": lambda p: {"x": p["x"][..., :32]},
    "weight dtype": lambda p: {"weight": p["weight"].half()},
    "bias of another length": lambda p: {"bias": p["bias"][1:]},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_errors(wrong):
    p = drawn(2, 1, 70, 64, torch.float32)
    with pytest.raises(ERRORS):
        ops.linear(**{**p, **WRONG[wrong](p)})


def test_opcheck():
    opcheck("linear", drawn(2, 3, 70, 64, torch.bfloat16))
