"""Random problems for the op tests."""

import math
import random

import pytest
import torch
from helpers import ERRORS, call, same_bits

NAN, INF = float("nan"), float("inf")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DIMS = [8, 32, 40, 64, 80, 96, 128, 256]
LAYOUTS = ["dense", "transposed", "unaligned", "expanded"]


def i32(x):
    return torch.as_tensor(x, dtype=torch.int32)


def laid_out(x, layout):
    """The same values (expanded: head 0's for all) in strides that models produce; memory between them is NaN."""
    if layout == "transposed":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "unaligned":  # an odd first element and an odd row stride
        B, H, T, D = x.shape
        wide = torch.full((B, T, H, D + 3), NAN, dtype=x.dtype)
        wide[..., 1 : D + 1] = x.transpose(1, 2)
        return wide[..., 1 : D + 1].transpose(1, 2)
    return x[:, :1].expand_as(x) if layout == "expanded" else x


def scattered(rng, lengths, room=0):
    """Offsets that place the heads in random order with gaps between; and the rows of the whole buffer."""
    flat, at = [0] * lengths.numel(), rng.randrange(4)
    for head in rng.sample(range(lengths.numel()), lengths.numel()):
        flat[head] = at
        at += int(lengths.flatten()[head]) + room + rng.randrange(4)
    return torch.tensor(flat, dtype=torch.int64).view_as(lengths), at + 2


def problem(
    seed, *, B=2, G=2, Hkv=2, T=9, S=None, D=64, dtype=torch.float32, lens=None, first=None, layout="transposed",
    softcap=0.0, sinks=False, room=1,
):  # fmt: skip
    """Arguments of every op by name, those of a `Held` by the names that torch's schema has: `held_k` is held.k. Gaps
    and left padding are NaN: they must never matter."""
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    S, H = T if S is None else S, G * Hkv

    def normal(*shape):
        return torch.randn(*shape, generator=gen)

    def drawn(shape, *values):
        return i32([rng.choice(values) for _ in range(math.prod(shape))]).view(shape)

    length = drawn((B, Hkv), 0, 1, 2, 7, 8, 15, 16, 17, 31, 33, 64, 65, 100, 131)
    if lens is not None:
        length = i32(lens).expand(B, Hkv).contiguous()
    first = drawn((B,), 0, 0, S // 3, S) if first is None else i32(first).expand(B).contiguous()
    stop = i32([rng.choice([S, S, (S + int(f)) // 2, int(f)]) for f in first])
    offset, rows = scattered(rng, length, room)
    k, v = normal(B, Hkv, S, D).to(dtype), normal(B, Hkv, S, D).to(dtype)
    held_k, held_v = (torch.full((rows, D), NAN, dtype=dtype) for _ in "kv")
    held_pos = torch.full((rows,), -7, dtype=torch.int32)
    for o, n in zip(offset.flatten(), length.flatten(), strict=True):
        held_k[o : o + n], held_v[o : o + n] = normal(n, D).to(dtype), normal(n, D).to(dtype)
        held_pos[o : o + n] = torch.arange(n, dtype=torch.int32) * 3
    k, v = laid_out(k, layout), laid_out(v, layout)
    if layout != "expanded":
        for b in range(B):
            k[b, :, : first[b]], v[b, :, : first[b]] = NAN, NAN
    return {
        "q": laid_out(normal(B, H, T, D).to(dtype), layout),
        "k": k, "v": v, "pos": torch.arange(1000, 1000 + B * S, dtype=torch.int32).view(B, S),
        "first": first, "stop": stop, "row_first": drawn((B,), 0, 0, T // 2, T),
        "held_k": held_k, "held_v": held_v, "held_pos": held_pos, "held_offset": offset, "held_len": length,
        "held_centre": None, "held_k_kind": 0, "held_v_kind": 0,
        "scale": D**-0.5, "softcap": softcap, "sinks": normal(H) if sinks else None,
    }  # fmt: skip


def matrix(case, dtype, **fixed):
    """One of the problems of test_matches, each with another head dimension; test_isa runs them all."""
    return problem(case, D=DIMS[case], dtype=dtype, G=2 ** (case % 4), layout=LAYOUTS[(case + case // 4) % 4], **fixed)


def of_matrix(test):
    """A test of `case` and `dtype`, run for every problem of `matrix`."""
    test = pytest.mark.parametrize("dtype", DTYPES)(pytest.mark.parametrize("case", range(8))(test))
    return pytest.mark.quick(case=0)(test)


def fuzz(seed, **fixed):
    """A problem with everything drawn, `fixed` apart."""
    rng = random.Random(seed)
    T = fixed.pop("T", rng.choice([1, 2, 3, 5, 8, 13, 16, 17, 33, 65]))
    drawn = {
        "B": rng.choice([1, 2, 3]), "G": rng.choice([1, 2, 4, 8]), "Hkv": rng.choice([1, 2, 3]), "T": T,
        "S": rng.choice([T, T, T, T + 3, T + 40, T // 2, 0]), "D": rng.choice([8, 24, 32, 40, 64, 80, 96, 128, 256]),
        "dtype": rng.choice(DTYPES), "layout": rng.choice(LAYOUTS),
        "softcap": rng.choice([0.0, 0.0, 1.5]), "sinks": rng.random() < 0.3,
    }  # fmt: skip
    if rng.random() < 0.25:  # more heads in a group than the kernels' tiles have rows
        drawn |= {"B": 1, "Hkv": 1, "G": rng.choice([49, 61, 64, 71, 128])}
    return problem(seed, **{**drawn, **fixed})


def refuses(op, check, p, change, kept=()):
    """`p` is right; with the change it is an error, and the tensors that are `kept` are as before."""
    check(p)
    p = {**p, **change(p)}
    before = copied(p, *kept)
    with pytest.raises(ERRORS):
        call(op, p)
    assert all(same_bits(p[name].contiguous(), before[name].contiguous()) for name in kept)


def copied(args, *names):
    return {**args, **{name: args[name].clone() for name in names}}


def alive_counts(p):
    return p["held_len"] + (p["stop"] - p["first"])[:, None]
