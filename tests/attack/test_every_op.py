"""Every op with random shapes, dtypes, strides and lengths, and with something wrong: as the float64 oracle has it, or
an error and nothing written."""

from itertools import pairwise

import fuzzing
import problems
import torch
from helpers import ERRORS, call, same_bits
from op_cases import attend, compact, decode, error, kl, linear, norm, peak, quadratic, refine, score, select
from problems import DTYPES

from kvevict.ops import _native
from kvevict.ops import _ops as ops

SHORT = (0, 0, 1, 1, 2, 7, 33)


def problem(rng, **fixed):
    """Small, often with heads that hold nothing or one slot."""
    B, Hkv, T = rng.choice((1, 2)), rng.choice((1, 2, 3)), rng.choice((1, 1, 2, 5, 17))
    G = rng.choice((1, 2, 4)) if rng.random() < 0.9 else rng.choice((61, 71, 128))
    drawn = dict(B=B, Hkv=Hkv, T=T, S=rng.choice((0, 1, T, T + 3)), G=G, dtype=rng.choice(DTYPES))
    drawn |= dict(D=rng.choice((8, 24, 32, 64, 80, 128, 256, 512)), layout=rng.choice(problems.LAYOUTS), **fixed)
    drawn |= dict(softcap=rng.choice((0.0, 1.5)), sinks=rng.random() < 0.3)
    if rng.random() < 0.7:
        drawn["lens"] = [[rng.choice(SHORT) for _ in range(Hkv)] for _ in range(B)]
    return problems.problem(rng.randrange(10**6), **drawn)


def scored(rng):
    p = score.prepared(problem(rng), rng.random() < 0.5, rng.choice(score.REDUCE), rng.randrange(4))
    return p | {"group": rng.choice(score.GROUP)}


def errors(rng):
    return error.prepared(
        problem(rng), rng.choice(error.KINDS), rng.random() < 0.5, rng.randrange(99), rng.randrange(4),
        group=rng.choice(error.GROUP),
    )  # fmt: skip


OPS = {  # name: (its tests, arguments drawn)
    "attend": (attend, lambda rng: problem(rng) | {"stop": None}),
    "score": (score, scored),
    "peak": (peak, lambda rng: peak.prepared(problem(rng), rng.randrange(99), rng.random() < 0.5)),
    "error": (error, errors),
    "kl": (kl, lambda rng: kl.prepared(problem(rng), rng.randrange(99), rng.random() < 0.7)),
    "refine": (refine, lambda rng: refine.prepared(
        problem(rng), rng.randrange(99), rng.randrange(4), fast=rng.random() < 0.5, squared=rng.random() < 0.5)),
    "norm": (norm, lambda rng: norm.prepared(problem(rng), rng.choice("kv"), rng.choice((1, 2)))),
    "quadratic": (quadratic, lambda rng: quadratic.prepared(
        problem(rng), rng.choice("kv"), rng.randrange(99))),
    "select": (select, lambda rng: select.drawn(rng.randrange(10**6), C=rng.choice((1, 2, 7, 64, 200)))),
    "compact": (compact, lambda rng: compact.prepared(problem(rng), rng.randrange(99))),
    "linear": (linear, lambda rng: linear.drawn(
        rng.choice((0, 1, 2, 5)), rng.choice((1, 3, 17)), rng.choice((0, 1, 63, 64, 130)), 32 * rng.randrange(7),
        rng.choice(DTYPES), rng.random() < 0.5, rng.randrange(99))),
    "decode": (decode, lambda rng: decode.prepared(problem(rng) | one_row(rng), rng.random() < 0.7)),
}  # fmt: skip
WRITTEN = {"compact": compact.DST, "decode": decode.SLOTS}
WORDS = dict(reduce="avg", group="all", term="b", kind="l3")


def check(name, tests, p):
    """Of a few slots the terms of kl's gradient cancel, so that it is off by more of itself."""
    tests.check(p, *([100 * kl.GRAD[p["q"].dtype]] if name == "kl" else []))


def overlapping(name, p) -> bool:
    """Whether heads write rows of each other: the caller's part, what is read and written first is open."""
    offset, count = (p["held_offset"], p["held_len"] + 1) if name == "decode" else (p["dst_offset"], p["keep"])
    rows = sorted(zip(offset.flatten().tolist(), count.flatten().tolist()))
    return any(a + n > b for (a, n), (b, m) in pairwise(rows) if n and m)


def one_row(rng):
    return problem(rng, T=1, S=1, first=0)


def spoilt(rng, name, p):
    """The arguments with one that is other: of another shape, dtype, stride or content."""
    known = [arg.name for arg in _native.arguments(name) if arg.name in p]
    at = rng.choice(known)
    value = p[at]
    if isinstance(value, torch.Tensor):
        return p | {at: tensor(rng, value)}
    if at in WORDS:
        return p | {at: rng.choice((WORDS[at], "", "max", "none", "sum"))}
    if at == "columns":
        return p | {at: rng.choice((-1, 0, value - 1, value + 1, value - 4, -(2**63), 2**62))}
    if at == "p":
        return p | {at: rng.choice((0, 3, -1, 2**32 + 1))}
    if at == "alpha":
        return p | {at: rng.choice((-0.1, float("nan")))}
    return p


def tensor(rng, x):
    kind = rng.randrange(6)
    if kind == 0:
        return x.to(rng.choice((torch.float64, torch.int64, torch.int32, torch.bool, *DTYPES)))
    if kind == 1:
        return x.reshape(rng.choice(((-1,), (*x.shape, 1), (1, *x.shape)))) if x.numel() else x[None]
    if kind == 2:
        dim = rng.randrange(x.ndim)
        return x.narrow(dim, 0, rng.randrange(x.shape[dim] + 1))
    if kind == 3:
        return torch.cat([x, x], rng.randrange(x.ndim))
    if kind == 4:
        return x.repeat_interleave(2, -1)[..., ::2]  # the same, with gaps
    if x.is_floating_point() or not x.numel():
        return x.new_empty(0)
    x, wrong = x.clone(), (-1, 1, 2, 8, 10**6, 2**31 - 1, -(2**31))
    wrong += (2**63 - 1, -(2**63), 2**62) if x.dtype == torch.int64 else ()
    x.view(-1)[rng.randrange(x.numel())] = rng.choice(wrong)
    return x


def test_ops():
    def case(rng):
        name = rng.choice([*OPS])
        tests, draw = OPS[name]
        p = draw(rng)
        if rng.random() < 0.4:
            check(name, tests, p)
            return f"{name} right"
        if name == "kl":  # its oracle takes NaN for padding, and a changed length may make it alive
            p |= {each: p[each].nan_to_num() for each in ("k", "held_k")}
        p = spoilt(rng, name, p)
        written = WRITTEN.get(name, ())
        tried = {**p, **{each: p[each].clone() for each in written}}
        try:
            call(getattr(ops, name), tried)
        except ERRORS as error:
            assert str(error)
            assert all(same_bits(tried[each], p[each]) for each in written)
            return f"{name} refused"
        if name in WRITTEN and overlapping(name, p):
            return f"{name} of heads that share rows"
        check(name, tests, p)
        return f"{name} right, though changed"

    fuzzing.expect(fuzzing.fuzz(case, cases=500), *(f"{name} {came}" for name in OPS for came in ("right", "refused")))
