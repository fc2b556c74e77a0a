import pytest
import ref
import torch
from helpers import call, close, opcheck, same_bits, same_for_threads
from problems import DTYPES, LAYOUTS, i32, laid_out, refuses

from kvevict.ops import _ops as ops


def rotation(B, D, gen):
    """cos, sin and partner of dimension pairs (i, i + D / 2), as most models have them."""
    angle = torch.rand(B, D // 2, generator=gen) * 6
    cos, sin = angle.cos().repeat(1, 2), torch.cat([-angle.sin(), angle.sin()], 1)
    return {"cos": cos, "sin": sin, "partner": torch.arange(D).roll(D // 2).int()}


def problem(seed, B=2, H=4, R=9, D=64, dtype=torch.float32, layout="transposed", turned=True):
    gen = torch.Generator().manual_seed(seed)
    q, past = (torch.randn(B, H, R, D, generator=gen) for _ in range(2))
    none = dict.fromkeys(("cos", "sin", "partner"))
    p = {"q": laid_out(q.to(dtype), layout), "past": past, "decay": torch.rand(B, generator=gen)}
    return {**p, **(rotation(B, D, gen) if turned else none)}


def check(p):
    got = call(ops.probe, p)
    close(got, call(ref.probe, p), 2.0**-22)  # three products and two sums, each rounded
    return got


@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("D", [8, 40, 64, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches(dtype, D, turned):
    check(problem(D, D=D, dtype=dtype, layout=LAYOUTS[D // 8 % 4], turned=turned))


@pytest.mark.parametrize("B, H, R", [(0, 2, 3), (1, 1, 0), (1, 1, 1), (3, 5, 70)])
def test_sizes(B, H, R):
    check(problem(1, B=B, H=H, R=R, layout="dense"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_torch(dtype):
    """Each operation rounds as torch's does, so policies keep the slots that they kept with torch's expressions."""
    p = problem(2, dtype=dtype)
    past, cos, sin = p["past"], p["cos"][:, None, None], p["sin"][:, None, None]
    decay = p["decay"][:, None, None, None]
    past = past * cos + past[..., p["partner"].long()] * sin
    assert same_bits(check(p), decay * past + (1 - decay) * p["q"].float())


def test_no_past():
    """A batch row whose decay is 0 gets its own queries."""
    p = problem(3) | {"decay": torch.tensor([0.0, 0.5])}
    assert torch.equal(check(p)[0], p["q"][0])


def test_threads_and_opcheck():
    p = problem(4, R=90)
    assert same_for_threads(lambda: (call(ops.probe, p),))
    opcheck("probe", problem(5, B=1, R=2))


def test_errors():
    p = problem(6)
    for change in ({"sin": None}, {"partner": i32([64] * 64)}, {"decay": torch.rand(3)}, {"past": p["past"][:, :3]}):
        refuses(ops.probe, check, p, lambda p, change=change: change)
