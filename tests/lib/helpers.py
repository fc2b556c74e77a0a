"""How the tests of ops run them, and the comparison they all use."""

import ctypes
import inspect
import mmap

import torch

from kvevict.ops._native import PARTS
from kvevict.ops._ops import Held, build_info

ERRORS = (RuntimeError, ValueError, TypeError)

# Relative to the size of a sum. n roundings of fp32, in whatever order a processor adds, come to 2^-24 sqrt(n), the
# standard deviation of independent ones: four of these for a logit's D <= 256 products and a sum over 1,500 slots.
# 16-bit inputs are rounded before either side sees them, so only the output's rounding is added: half a unit in the
# last place, at most 2^-8 (bf16) or 2^-11 (fp16) of the value.
FP32 = 4 * (256 + 1500) ** 0.5 * 2.0**-24
OUT = {torch.float32: FP32, torch.bfloat16: 2.0**-8 + FP32, torch.float16: 2.0**-11 + FP32}


device = torch.device("cpu")  # where `call` and `opcheck` run ops; conftest.py sets it


def on_gpu() -> bool:
    """Whether ops can run on a GPU."""
    return torch.cuda.is_available() and build_info()["cuda"]


class Moved:
    """Tensors on another device, strides and shared memory as here; the end of a `with` copies results back."""

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
    """The arguments that fn names; where it names `held`, `held_k` and the like are one `Held`, or None if all are."""
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
    if device.type == "cpu" or fn.__module__ != "kvevict.ops._ops":
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
    torch.library.opcheck(
        op, tuple(moved(args.get(a.name, 0 if a.name.endswith("_kind") else None)) for a in op._schema.arguments)
    )
