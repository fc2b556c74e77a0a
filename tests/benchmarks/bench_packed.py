"""python tests/benchmarks/bench_packed.py [--seconds S]: slots as computed (bf16), in 8 bits, with keys in 8 and values
in 4, and in 4 bits: one decoded token at 8k and 32k slots, and 1,024 rows on 4,096 stored slots.

Every kind's result is compared with the float64 oracle on the numbers that its bytes stand for, or at the larger sizes
with that of bf16, before it is timed. One thread; the CPU's time of that thread, the kinds taking turns. A ratio is the
median of the ratios of a turn, so that a slower or faster machine meanwhile falls out."""

import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "lib"))
import ref
from bench_read import arguments

from kvevict.ops import _ops as ops
from kvevict.policy import kv

KINDS = {"bf16": kv.KINDS["model"]} | {name: kinds for name, kinds in kv.KINDS.items() if name != "model"}
NEAR = {"bf16": 0.01, "int8": 0.03, "k8v4": 0.2, "int4": 0.3}  # of the largest output, from bf16's; random keys
SHAPES = [(32, 8, 128), (8, 2, 64)]  # H, Hkv, D


def stored(k, v, kinds):
    """The slots in one buffer each, stored by `compact`, with room for one more a head."""
    (_, heads, n, _), room = k.shape, k.shape[2] + 1
    buffers = [(one := kv.buffer(kind, k)).new_zeros(heads * room, one.shape[1]) for kind in kinds]
    offset, full = (torch.arange(heads) * room)[None], torch.full((1, heads), n, dtype=torch.int32)
    held = ops.Held(*buffers, torch.zeros(heads * room, dtype=torch.int32), offset, full * 0, k.float().mean(2), *kinds)
    first, pos = torch.zeros(1, dtype=torch.int32), torch.arange(n, dtype=torch.int32)[None]
    ops.compact(held, k, v, pos, first, None, full, held)
    held.len = full
    return held


def checked(results):
    for kind, out in results.items():
        error = (out.double() - results["bf16"].double()).abs().max() / results["bf16"].double().abs().max()
        if not error <= NEAR[kind]:
            raise SystemExit(f"{kind}: off by {error:.2g} of the largest output")


def against_the_oracle():
    """A small problem of every kind: the bytes' numbers in float64."""
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, h, n, 64, generator=g).bfloat16() for h, n in ((8, 32), (2, 300), (2, 300)))
    none = torch.zeros(1, dtype=torch.int32)
    for kind, kinds in KINDS.items():
        held = stored(k, v, kinds)
        new = k[:, :, :32], v[:, :, :32]
        (out, _), (want, _) = (attend(q, held, *new, none, scale=0.125) for attend in (ops.attend, ref.attend))
        error = (out.double() - want).abs().max() / want.abs().max()
        if not error <= 2.0**-6:
            raise SystemExit(f"{kind}: off by {error:.2g} from the oracle")


def taken(runs, seconds):
    """Milliseconds of the thread of each, in turns."""
    times, end = {name: [] for name in runs}, time.perf_counter() + seconds
    while len(times["bf16"]) < 5 or time.perf_counter() < end:
        for name, run in runs.items():
            start = time.thread_time()
            run()
            times[name].append((time.thread_time() - start) * 1e3)
    return times


def told(title, runs, seconds):
    checked({name: run()[0] for name, run in runs.items()})
    times = taken(runs, seconds)
    ratios = {name: statistics.median(a / b for a, b in zip(each, times["bf16"])) for name, each in times.items()}
    row = "  ".join(f"{name} {statistics.median(times[name]):7.3f} ms {ratios[name]:.2f}" for name in runs)
    print(f"{title:34} {row}", flush=True)


def run_of(held, q, k, v, pos, scale):
    if q.shape[2] == 1:
        return lambda: ops.decode(q, k, v, pos, held, scale=scale)
    return lambda: ops.attend(q, held, k, v, torch.zeros(1, dtype=torch.int32), scale=scale)


def main():
    seconds = arguments(__doc__, seconds=6.0).seconds  # of each line
    torch.set_num_threads(1)
    against_the_oracle()
    print(f"isa {ops.cpu_isa()}, one thread")
    for heads, kv_heads, dim in SHAPES:
        g, scale = torch.Generator().manual_seed(0), dim**-0.5
        for n, rows in ((8192, 1), (32768, 1), (4096, 1024)):
            k, v, new_k, new_v = (torch.randn(1, kv_heads, i, dim, generator=g).bfloat16() for i in (n, n, rows, rows))
            q, pos = torch.randn(1, heads, rows, dim, generator=g).bfloat16(), torch.full((1, 1), n, dtype=torch.int32)
            slots = {kind: stored(k, v, kinds) for kind, kinds in KINDS.items()}

            title = f"{heads}/{kv_heads} heads of {dim}, {rows} on {n}"
            told(title, {kind: run_of(held, q, new_k, new_v, pos, scale) for kind, held in slots.items()}, seconds)


if __name__ == "__main__":
    main()
