"""Random problems for the op tests, and the comparison they all use."""

import ctypes
import inspect
import math
import mmap
import random

import torch

from kvevict._native import PARTS
from kvevict._ops import Held

NAN, INF = float("nan"), float("inf")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DIMS = [8, 32, 40, 64, 80, 96, 128, 256]
LAYOUTS = ["dense", "transposed", "unaligned", "expanded"]
ERRORS = (RuntimeError, ValueError, TypeError)

# Relative to the size of a sum. n roundings of fp32, in whatever order a processor adds, come to 2^-24 sqrt(n), the
# standard deviation of independent ones: four of these for a logit's D <= 256 products and a sum over 1,500 slots.
# 16-bit inputs are rounded before either side sees them, so only the output's rounding is added: half a unit in the
# last place, at most 2^-8 (bf16) or 2^-11 (fp16) of the value.
FP32 = 4 * (256 + 1500) ** 0.5 * 2.0**-24
OUT = {torch.float32: FP32, torch.bfloat16: 2.0**-8 + FP32, torch.float16: 2.0**-11 + FP32}


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
        "held_centre": None,
        "scale": D**-0.5, "softcap": softcap, "sinks": normal(H) if sinks else None,
    }  # fmt: skip


def matrix(case, dtype, **fixed):
    """One of the problems of test_matches, each with another head dimension; test_isa runs them all."""
    return problem(case, D=DIMS[case], dtype=dtype, G=2 ** (case % 4), layout=LAYOUTS[(case + case // 4) % 4], **fixed)


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


device = torch.device("cpu")  # where `call` and `opcheck` run ops; conftest.py sets it


class Moved:
    """Tensors on another device with the same strides and shared memory as here. At the end of a `with`, results are
    copied back."""

    def __init__(self, device):
        self.device, self.storages = device, {}

    def __call__(self, t):
        if not isinstance(t, torch.Tensor) or self.device.type == "cpu":
            return t
        here = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage())
        _, there = self.storages.setdefault(here.data_ptr(), (here, here.to(self.device)))
        return there.view(t.dtype).as_strided(t.shape, t.stride(), t.storage_offset())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for here, there in self.storages.values():
            here.copy_(there)


def back(result):
    return result.cpu() if isinstance(result, torch.Tensor) else result and tuple(map(back, result))


def held_of(p):
    return Held(**{part: p[f"held_{part}"] for part in PARTS if f"held_{part}" in p})


def named(fn, args, moved=lambda value: value):
    """Those of the arguments that fn names: where it names `held`, `held_k` and the like are one `Held`, or None if
    they are."""
    found = {}
    for name in inspect.signature(fn).parameters:
        parts = {part: moved(args[f"{name}_{part}"]) for part in PARTS if f"{name}_{part}" in args}
        if parts:
            found[name] = None if all(part is None for part in parts.values()) else Held(**parts)
        elif name in args:
            found[name] = moved(args[name])
    return found


def on_cpu(fn, args):
    return fn(**named(fn, args))


def call(fn, args):
    """`on_cpu`, but that an op runs on `device`."""
    if device.type == "cpu" or fn.__module__ != "kvevict._ops":
        return on_cpu(fn, args)
    with Moved(device) as moved:
        return back(fn(**named(fn, args, moved)))


def guarded(x):
    """The same numbers in memory that ends where nobody may read: reading past them ends the process."""
    size, page = x.nbytes, mmap.PAGESIZE
    before = -(-size // page) * page
    memory = mmap.mmap(-1, before + page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + before), ctypes.c_size_t(page), 0) == 0
    return torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=before - size).view_as(x).copy_(x)


def copied(args, *names):
    return {**args, **{name: args[name].clone() for name in names}}


def alive_counts(p):
    return p["held_len"] + (p["stop"] - p["first"])[:, None]


def close(got, want, tol, least=0.0):
    """NaN and infinity in the same places; elsewhere within `tol` of the largest value, or of `least`."""
    assert got.shape == want.shape
    got = got.double()
    assert torch.equal(got.isnan(), want.isnan())
    finite = want.isfinite()
    assert torch.equal(got[~finite].nan_to_num(), want[~finite].nan_to_num())
    if finite.any():
        error, limit = (got - want)[finite].abs().max(), tol * max(want[finite].abs().max(), least)
        assert error <= limit, f"error {error:.3g} over {limit:.3g}"


def same_bits(a, b):
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def same_for_threads(run):
    """`run()` gives the same bits with one thread, two, and two again."""
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 2):
            torch.set_num_threads(count)
            results.append(run())
    finally:
        torch.set_num_threads(threads)
    return all(same_bits(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def opcheck(name, args):
    op = getattr(torch.ops.kvevict, name).default
    moved = Moved(device)
    torch.library.opcheck(op, tuple(moved(args.get(a.name)) for a in op._schema.arguments))
