"""python tests/benchmarks/bench_ops.py [--quick] [--only REGEX] [--cpu-time] [--device cuda]: the ops beside torch's
SDPA, and `linear` beside torch's, on the same data.

SDPA gets [stored | new] in one tensor. Joining them is not timed, although a cache would have to do it for each call.
Every result is compared before it is timed; times are medians, with the two sides alternating. On a GPU a side is
captured in a CUDA graph of several calls and timed by events, so the time is the GPU's, with data that stays in its
caches between calls; SDPA is called in its fastest way.

On a CPU the same run measures the machine's peaks (peaks.c: multiply-adds of fp32 and of bf16, reading at best and, as
"stream", all of a buffer). Each op's share of a peak is printed: of the fp32 peak, or of the bf16 peak if the kernels
multiply in bf16; for decode, of both rates of reading.
"""

import argparse
import ctypes
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from bench_packed import KINDS, NEAR
from bench_packed import stored as packed_slots
from torch.nn.attention.bias import causal_lower_right

from kvevict.engine.memory.latent import LatentLayer
from kvevict.engine.memory.sequence import Sequence
from kvevict.engine.memory.storage import Storage
from kvevict.ops import _ops as ops

READING = ("read", "stream")
SHAPES = [(32, 8, 128), (8, 2, 64), (32, 8, 96)]  # H, Hkv, D
ROWS = {"cpu": (1024, [4096, 512]), "cuda": (4096, [10240, 512])}  # new, stored
# Two roundings to the output's dtype, and SDPA's rounding of the weights in 16 bit.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6}


def machine():
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        found = re.search(r"model name\s*: (.*)", cpuinfo.read_text())
        model = found[1] if found else model
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return {"cpu": model, "threads": torch.get_num_threads(), "isa": ops.cpu_isa(), "torch": torch.__version__, **gpu}


ISA_FLAGS = {"scalar": "", "avx2": "-mavx2 -mfma", "avx512": "-mavx512f", "avx512bf16": "-mavx512f -mavx512bf16"}
ISA_FLAGS["amxbf16"] = ISA_FLAGS["avx512bf16"] + " -mamx-tile -mamx-bf16"


def peaks(seconds=0.3):
    """{"fp32", "bf16": FLOP/s, "read": bytes/s} of all threads together, with the vectors of the kernels' ISA. bf16 is
    that of the machine, whether the kernels use it or not; 0 if it has none."""
    threads, block = torch.get_num_threads(), torch.ones(2**26)  # of 256 MiB each
    source, blocks = Path(__file__).with_name("peaks.c"), [block.clone() for _ in range(threads)]
    is_pairs = " avx512_bf16" in Path("/proc/cpuinfo").read_text() and ops.cpu_isa() == "avx512"
    native = "avx512bf16" if is_pairs else ops.cpu_isa()

    def summed(isa, function, *arguments):
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(threads) as pool:
            command = [os.environ.get("CC", "cc"), "-O3", "-ffp-contract=fast", "-shared", "-fPIC", str(source)]
            subprocess.run([*command, *shlex.split(ISA_FLAGS[isa]), "-o", f"{folder}/peaks.so"], check=True)
            run = getattr(ctypes.CDLL(f"{folder}/peaks.so"), function)  # lets go of Python's lock
            run.restype = ctypes.c_double
            return sum(pool.map(lambda i: run(*(x[i] for x in arguments), ctypes.c_double(seconds)), range(threads)))

    addresses = [ctypes.c_void_p(x.data_ptr()) for x in blocks]
    sizes = [ctypes.c_size_t(x.numel() * 4) for x in blocks]
    reading, stream = (summed(ops.cpu_isa(), name, addresses, sizes) for name in ("peak_read", "sustained_read"))
    products = {"fp32": summed(ops.cpu_isa(), "peak_fp32"), "bf16": summed(native, "peak_bf16")}
    return {**products, "read": reading, "stream": stream}


def close(name, got, want, tolerance):
    error = (got.double() - want.double()).abs().max().item() / want.double().abs().max().item()
    if not error <= tolerance:
        raise SystemExit(f"{name}: off by {error:.2g}, {tolerance:.2g} allowed")


def timed(run, clock=time.perf_counter):
    """A function that runs `run` and returns the milliseconds it took."""

    def once():
        start = clock()
        run()
        return (clock() - start) * 1e3

    return once


def timed_on_gpu(run, calls=20):
    graph, start, end = torch.cuda.CUDAGraph(), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # the first call's setup must not be captured
        run()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()

    def once():
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / calls

    return once


def medians(runs, seconds):
    """Milliseconds of each, `timed`, taking turns until `seconds` are over, three turns at least."""
    times = [[] for _ in runs]
    for run in runs:
        run()
    end = time.perf_counter() + seconds
    while len(times[0]) < 3 or time.perf_counter() < end:
        for run, taken in zip(runs, times):
            taken.append(run())
    return [statistics.median(taken) for taken in times]


def sdpas(q, keys, values, mask, scale):
    """The ways to call SDPA, `mask` being causal at the lower right, or None; on a CPU only the first."""
    wide = [x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (keys, values)]
    causal = None if mask is None else causal_lower_right(*mask.shape)
    dot = F.scaled_dot_product_attention
    ways = [
        lambda: dot(q, keys, values, attn_mask=mask, scale=scale, enable_gqa=True),
        lambda: dot(q, *wide, attn_mask=mask, scale=scale),
        lambda: dot(q, *wide, attn_mask=causal, scale=scale),
    ]
    if not q.is_cuda:
        return ways[0]
    return min(ways, key=lambda way: medians([timed_on_gpu(way)], 0.1))


def heads(count, *values):
    return [torch.full((1, count), value, dtype=torch.int32) for value in values]


def data(H, Hkv, D, stored, new, dtype):
    """One batch row: `stored` slots per head with room for one more, and `new` columns as a model leaves them."""
    stride = stored + 1
    offset = torch.arange(Hkv).view(1, Hkv) * stride
    slots = torch.randn(2, Hkv * stride, D).to(dtype)
    q, k, v = (torch.randn(1, new, n, D).to(dtype).transpose(1, 2) for n in (H, Hkv, Hkv))

    def joined(slots, rows):
        return torch.cat([slots.view(1, Hkv, stride, D)[:, :, :stored], rows], 2)

    pos = torch.zeros(Hkv * stride, dtype=torch.int32)
    held = ops.Held(*slots, pos, offset, heads(Hkv, stored)[0])
    return q, k, v, held, joined(held.k, k), joined(held.v, v), D**-0.5


def bench_attend(H, Hkv, D, stored, new, dtype):
    q, k, v, held, keys, values, scale = data(H, Hkv, D, stored, new, dtype)
    mask = torch.ones(new, stored + new, dtype=torch.bool).tril(stored)
    zero, stop = torch.zeros(1, dtype=torch.int32), torch.full((1,), new, dtype=torch.int32)
    attend = partial(ops.attend, q, held, k, v, zero, scale=scale)
    sdpa = sdpas(q, keys, values, mask, scale)
    lse = attend()[1]

    def h2o():
        more = {"reduce": "sum", "columns": stored + new, "causal": True, "lse": lse}
        return ops.score(q, zero, held, k, zero, stop, scale=scale, **more)

    rows = {"row_first": zero, "stop": stop, "scale": scale, "observers": new}
    both = partial(ops.attend_score, q, held, k, v, zero, **rows, reduce="sum", columns=stored + new)
    close("attend", attend()[0], sdpa().transpose(1, 2), TOLERANCE[dtype])
    close("attend_score", both()[2], h2o(), 0.0)
    logits = (q[0, : H // Hkv].float() @ keys[0, 0].float().T * scale).masked_fill(~mask, -torch.inf)
    if dtype != torch.float32:  # how far each is from the exact output of the first group
        exact = logits.double().softmax(-1) @ values[0, 0].double()
        outs = attend()[0].transpose(1, 2), sdpa()
        errors = [(out[0, : H // Hkv].double() - exact).norm() / exact.norm() for out in outs]
        print(f"error of attend {errors[0]:.2e}, of sdpa {errors[1]:.2e}: {H}/{Hkv} d={D} {new} on {stored} {dtype}")
    close("score", h2o()[0, 0], logits.softmax(-1).sum(1).mean(0), 1e-5)
    close("score", h2o().sum(-1), torch.full((1, Hkv), float(new)), 1e-5)
    name = f"{H}/{Hkv} d={D} {new} on {stored} {str(dtype)[6:]}"
    flop = 2 * D * H * sum(stored + t + 1 for t in range(new))  # of one product
    unit = "bf16" if dtype == torch.bfloat16 and ops.cpu_isa().endswith("bf16") else "fp32"
    return [
        (f"attend {name}", attend, "sdpa", sdpa, (unit, 2 * flop)),
        (f"h2o score {name}", h2o, "attend", attend, (unit, flop)),
        (f"attend_score of all {name}", both, "attend", attend, (unit, 2 * flop)),
    ]


def window_error(kind, a, v, o):
    """kv_error of the first group with torch: a [G, rows, n], v [n, D], o [rows, G, D] -> [n]."""
    o = o.float().transpose(0, 1)
    if kind == "edie":
        return (a / (1.1 - a) * (v.abs().sum(1) + o.abs().sum(-1, keepdim=True))).sum((0, 1))
    distance = torch.cdist(o, v, p=float(kind[1]), compute_mode="donot_use_mm_for_euclid_dist")
    return (a / (1 - a) * distance).sum((0, 1))


def bench_window(H, Hkv, D, stored, new, dtype):
    """The ops of an eviction: of the last 32 rows, beside attend of the chunk, and of slots."""
    q, k, v, held, keys, values, scale = data(H, Hkv, D, stored, new, dtype)
    zero, stop = torch.zeros(1, dtype=torch.int32), torch.full((1,), new, dtype=torch.int32)
    attend = partial(ops.attend, q, held, k, v, zero, scale=scale)
    out, lse = attend()
    rows, alive = min(32, new), heads(Hkv, stored + new)[0]
    window = {"held": held, "k": k, "first": zero, "stop": stop}
    window |= {"q": q[:, :, -rows:], "row_first": zero, "lse": lse[:, :, -rows:], "scale": scale, "causal": True}

    def score(**more):
        return ops.score(**window, reduce="sum", columns=stored + new, **more)

    peak = partial(ops.peak, **window, lo=0 * alive, hi=alive)

    def error(kind):
        o = out[:, -rows:]
        return ops.error(**window, v=v, o=o, kind=kind, alpha=0.1, columns=stored + new)

    more = {"row_first": zero, "stop": stop, "scale": scale, "observers": rows}
    attend_error = partial(ops.attend_error, q, held, k, v, zero, kind="edie", alpha=0.1, columns=stored + new, **more)
    attend_peak = partial(ops.attend_peak, q, held, k, v, zero, causal=True, lo=0 * alive, hi=alive, **more)
    close("attend_error", attend_error()[2], error("edie"), 0.0)
    close("attend_peak", attend_peak()[2], peak(), 0.0)
    pooled = score()
    refine = partial(ops.refine, held, v, zero, stop, pooled)

    def caote():
        hn = pooled / pooled.sum(-1, keepdim=True)
        return hn / (1 - hn) * (values.float() - hn[:, :, None] @ values.float()).norm(dim=-1)

    norm = partial(ops.norm, held.of("v"), v, zero, stop, p=1, columns=stored + new)

    def torch_norm():
        return values.float().norm(p=1, dim=-1)

    mask = torch.ones(rows, stored + new, dtype=torch.bool).tril(stored + new - rows)
    a = (q[0, : H // Hkv, -rows:].float() @ keys[0, 0].float().T * scale).masked_fill(~mask, -torch.inf).softmax(-1)
    close("score", score(term="square")[0, 0], a.square().sum(1).mean(0), 1e-5)
    close("entropy", score(term="entropy")[0, 0], -torch.special.xlogy(a, a).sum(1).mean(0), 1e-5)
    close("peak", peak()[0, : H // Hkv], a.amax(-1), 1e-5)
    for kind in ("edie", "l1", "l2"):
        close(kind, error(kind)[0, 0], window_error(kind, a, values[0, 0].float(), out[0, -rows:, : H // Hkv]), 1e-5)
    close("refine", refine(), caote(), 1e-5)
    close("norm", norm(), torch_norm(), 1e-5)
    name = f"{H}/{Hkv} d={D} {rows} on {stored + new} {str(dtype)[6:]}"
    kinds = [(f"{kind} {name}", lambda kind=kind: error(kind), "attend", attend) for kind in ("edie", "l1", "l2")]
    kinds.append((f"attend_error edie {name}", attend_error, "attend", attend))
    kinds.append((f"attend_peak {name}", attend_peak, "attend", attend))
    slot_ops = [(f"refine {name}", refine, "torch", caote), (f"norm {name}", norm, "torch", torch_norm)]
    return [(f"score {name}", score, "attend", attend), (f"peak {name}", peak, "attend", attend), *kinds, *slot_ops]


def bench_decode(H, Hkv, D, stored, dtype):
    q, k, v, held, keys, values, scale = data(H, Hkv, D, stored, 1, dtype)
    pos = torch.zeros(1, 1, dtype=torch.int32)
    decode = partial(ops.decode, q, k, v, pos, held, scale=scale)
    sdpa = sdpas(q, keys, values, None, scale)
    close("decode", decode()[0], sdpa().transpose(1, 2), TOLERANCE[dtype])
    ragged = replace(held, len=(stored * torch.linspace(0.25, 1, Hkv)).int().view(1, Hkv))
    even = replace(held, len=torch.full((1, Hkv), int(ragged.len.sum()) // Hkv, dtype=torch.int32))

    def same_slots(slots):
        return lambda: ops.decode(q, k, v, pos, slots, scale=scale)

    name = f"{H}/{Hkv} d={D} on {stored} {str(dtype)[6:]}"
    return [
        (f"decode {name}", decode, "sdpa", sdpa, *((how, 2 * stored * Hkv * D * dtype.itemsize) for how in READING)),
        (f"ragged decode {name}", same_slots(ragged), "even", same_slots(even)),
    ]


def bench_packed(H, Hkv, D, stored):
    """A decoded token on slots of 8 and 4 bits, beside slots in bf16."""
    q, k, v, _, keys, values, scale = data(H, Hkv, D, stored, 1, torch.bfloat16)
    pos, ways = torch.zeros(1, 1, dtype=torch.int32), {}
    for kind, kinds in KINDS.items():
        held = packed_slots(keys[:, :, :stored], values[:, :, :stored], kinds)
        ways[kind] = lambda held=held: ops.decode(q, k, v, pos, held, scale=scale)
        close(kind, ways[kind]()[0], ways["bf16"]()[0], NEAR[kind])
    name, bf16 = f"{H}/{Hkv} d={D} on {stored}", ways.pop("bf16")
    return [(f"decode {kind} {name}", way, "bf16", bf16) for kind, way in ways.items()]


def bench_fork(H, Hkv, D, stored, dtype):
    """A decoded token 32 tokens after a fork, beside one of an unforked cache, with all of Python's time."""
    q, k, v, *_, keys, values, scale = data(H, Hkv, D, stored, 1, dtype)
    keys, values, columns = keys[:, :, :stored], values[:, :, :stored], 32
    pos, first = torch.arange(stored, dtype=torch.int32)[None], torch.zeros(1, dtype=torch.int32)
    zero = first.numpy()

    def storage(n):
        return Storage.empty(keys).append(keys[:, :, :n], values[:, :, :n], pos[:, :n].contiguous(), first, zero)

    own, forked, now = storage(stored), storage(stored - columns).forked(), pos[:, -1:].contiguous()
    tail = slice(stored - columns, stored)
    forked = forked.append(keys[:, :, tail], values[:, :, tail], pos[:, tail].contiguous(), first, zero)
    own, forked = own.with_room(), forked.with_room()
    for way in (own, forked):
        way.tick()
    results = [way.decode(q, k, v, now, scale=scale)[0] for way in (own, forked)]
    close("fork", results[1], results[0], 0.0)
    ways = [lambda way=way: way.decode(q, k, v, now, scale=scale) for way in (forked, own)]
    return [(f"fork decode {H}/{Hkv} d={D} on {stored} {str(dtype)[6:]}", ways[0], "own", ways[1])]


def bench_shared(H, Hkv, D, stored, dtype):
    """A decoded token of 8 rows that share a prefix, beside rows that each have a copy of it."""
    q, k, v, *_, keys, values, scale = data(8 * H, 8 * Hkv, D, stored, 1, dtype)
    pos, first = torch.arange(stored, dtype=torch.int32)[None], torch.zeros(1, dtype=torch.int32)
    text = Storage.empty(keys[:, :Hkv]).append(
        keys[:, :Hkv, :stored], values[:, :Hkv, :stored], pos, first, first.cpu().numpy()
    )
    shared = text.forked().aliased([0] * 8)
    apart = replace(shared, prefix=shared.prefix.moved(shared.prefix.capacity))
    shared, apart, now = shared.with_room(), apart.with_room(), pos[:, -1:].expand(8, 1).contiguous()
    rows = [x.reshape(8, -1, 1, D) for x in (q, k, v)]
    for way in (shared, apart):
        way.tick()
    ways = [partial(way.decode, *rows, now, scale=scale) for way in (shared, apart)]
    close("shared", ways[0]()[0], ways[1]()[0], 0.0)
    return [(f"decode of 8 rows {H}/{Hkv} d={D} sharing {stored} {str(dtype)[6:]}", ways[0], "apart", ways[1])]


def bench_short(H, Hkv, D, stored, rows, dtype):
    """A few rows on many slots: a question, a draft."""
    q, k, v, held, keys, values, scale = data(H, Hkv, D, stored, rows, dtype)
    zero, mask = torch.zeros(1, dtype=torch.int32), torch.ones(rows, stored + rows, dtype=torch.bool).tril(stored)
    attend = partial(ops.attend, q, held, k, v, zero, scale=scale)
    sdpa = sdpas(q, keys, values, mask, scale)
    close("attend", attend()[0], sdpa().transpose(1, 2), TOLERANCE[dtype])
    name = f"{H}/{Hkv} d={D} {rows} on {stored} {str(dtype)[6:]}"
    return [(f"short attend {name}", attend, "sdpa", sdpa, ("fp32", 4 * D * H * rows * stored))]


def bench_linear(N, K, rows, dtype):
    """A product of a decoded token's rows, with as many matrices in turn as no cache holds, as a model has."""
    x, weights = torch.randn(rows, 1, K).to(dtype), [torch.randn(N, K).to(dtype) for _ in range(2**28 // (2 * N * K))]

    def every(function):
        return [function(x, weight) for weight in weights]

    close("linear", ops.linear(x, weights[0]), F.linear(x, weights[0]), TOLERANCE[dtype])
    work = ("read", 2 * N * K * len(weights))
    name = f"linear {N} x {K} {rows} rows {str(dtype)[6:]}"
    return [(name, lambda: every(ops.linear), "torch", lambda: every(F.linear), work)]


class UpProjection(torch.nn.Module):
    """What DeepSeek-V2-Lite's attention makes keys and values of latents with; `plain`: of a Linear, which decoding
    absorbs, else of one that it does not look into."""

    heads, qk_nope_head_dim, qk_rope_head_dim, v_head_dim, rank = 16, 128, 64, 128, 512

    def __init__(self, plain, weight):
        super().__init__()
        kind = torch.nn.Linear if plain else type("Adapted", (torch.nn.Linear,), {})
        self.kv_b_proj = kind(self.rank, len(weight), bias=False)
        self.kv_b_proj.weight = torch.nn.Parameter(weight)

    def expand_kv(self, latent, rotated):
        both = self.kv_b_proj(latent)[:, 0].unflatten(-1, (self.heads, -1)).transpose(1, 2)
        key, value = both.split([self.qk_nope_head_dim, self.v_head_dim], -1)
        return torch.cat([key, rotated.expand(-1, self.heads, -1, -1)], -1), value


def bench_latent(stored, dtype):
    """A decoded token over latents, absorbed, beside expanding them for all heads."""
    made, ways = UpProjection, []
    weight = torch.randn(made.heads * 256, made.rank).to(dtype) / made.rank**0.5
    latent, rotated = torch.randn(1, 1, stored, made.rank).to(dtype), torch.randn(1, 1, stored, 64).to(dtype)
    q, first = torch.randn(1, made.heads, 1, 192).to(dtype), torch.zeros(1, dtype=torch.int32)
    pos = torch.arange(stored, dtype=torch.int32)[None]
    for plain in (True, False):
        layer, module = LatentLayer(Sequence()), made(plain, weight)
        packed = layer.pack(latent, rotated)
        layer.lazy_initialization(packed[0])
        layer.append(*packed, pos, first, first.numpy())
        layer.tick()
        new = *(x[:, :, :1] for x in packed), pos[:, :1].contiguous(), module
        ways.append(lambda layer=layer, new=new: layer.decode(q, *new, scale=192**-0.5, softcap=0.0, sinks=None))
    close("latents", ways[0]()[0], ways[1]()[0], TOLERANCE[dtype])
    return [(f"latent decode on {stored} {str(dtype)[6:]}", ways[0], "expanded", ways[1])]


def bench_evict(Hkv, D, stored, new, dtype):
    """Select and compact in place, as after a chunk, beside the same with torch's sort and gather."""
    _, k, v, held, keys, values, _ = data(Hkv, Hkv, D, stored, new, dtype)
    score, zero = torch.rand(1, Hkv, stored + new), torch.zeros(1, dtype=torch.int32)
    n, keep = heads(Hkv, stored + new, stored)
    pos = torch.zeros(1, new, dtype=torch.int32)

    def select():
        ends = {"protect_first": zero, "protect_last": zero}
        return ops.select(score=score, n=n, keep=keep, columns=stored, **ends)

    def evict():
        ops.compact(held, k, v, pos, zero, select(), keep, held)

    def indices():
        return score.sort(dim=-1, descending=True, stable=True).indices[..., :stored].sort(-1).values

    def gathered():
        index = indices()[..., None].expand(-1, -1, -1, D)
        return keys.gather(2, index), values.gather(2, index)

    if not torch.equal(select().long(), indices()):
        raise SystemExit("select: not what a stable sort gives")
    want = gathered()
    evict()
    for got, wanted in zip((held.k, held.v), want):
        close("compact", got.view(1, Hkv, -1, D)[:, :, :stored], wanted, 0.0)
    name = f"{Hkv} heads d={D} {stored} of {stored + new} {str(dtype)[6:]}"
    return [(f"select {name}", select, "sort", indices), (f"select+compact {name}", evict, "sort+gather", gathered)]


def bench_select(H, Hkv, D, stored, new, dtype):
    """The largest choice an eviction makes, beside attend of a chunk."""
    q, k, v, held, _, _, scale = data(H, Hkv, D, stored, new, dtype)
    n, kept, zero = 16384, 512, torch.zeros(1, dtype=torch.int32)
    score, (alive, keep) = torch.rand(1, Hkv, n), heads(Hkv, n, kept)

    def select():
        ends = {"protect_first": zero, "protect_last": zero}
        return ops.select(score=score, n=alive, keep=keep, columns=kept, **ends)

    attend = partial(ops.attend, q, held, k, v, zero, scale=scale)
    if not torch.equal(select().long(), score.topk(kept).indices.sort(-1).values):
        raise SystemExit("select: not what topk gives")
    return [(f"select {Hkv} heads {kept} of {n}", select, "attend", attend)]


def jobs(device, quick):
    (new, lengths), half = ROWS[device], torch.bfloat16
    for H, Hkv, D in SHAPES[1:] if quick else SHAPES:
        for dtype in TOLERANCE if device == "cpu" else [half]:
            for stored in lengths:
                yield bench_attend, (H, Hkv, D, stored, new, dtype)
            yield bench_window, (H, Hkv, D, lengths[0], new, dtype)
            for few in (1, 16):
                yield bench_attend, (H, Hkv, D, 512 - few, few, dtype)
            for stored in (32768, 4096):
                yield bench_decode, (H, Hkv, D, stored, dtype)
        if device == "cuda":
            yield bench_decode, (H, Hkv, D, 512, half)
            yield bench_shared, (H, Hkv, D, 4000, half)
            for stored in (32768, 4096, 512):
                yield bench_packed, (H, Hkv, D, stored)
        yield bench_select, (H, Hkv, D, lengths[0], new, torch.float32)
        yield bench_evict, (Hkv, D, lengths[0], new, half)


def few_rows():
    """Decoding and short queries on the CPU: many slots, one batch row."""
    for dtype in TOLERANCE:
        for group in (1, 2, 3, 4, 8):
            yield bench_decode, (8 * group, 8, 128, 32768, dtype)
        for stored in (512, 2048, 8192, 32768):
            yield bench_fork, (32, 8, 128, stored, dtype)
        for H, Hkv, D in ((9, 3, 64), (14, 2, 64), (32, 8, 128)):
            yield bench_shared, (H, Hkv, D, 4000, dtype)
        for group in (1, 4):
            for rows in (16, 64):
                yield bench_short, (8 * group, 8, 128, 32768, rows, dtype)
        yield bench_short, (4, 1, 128, 32768, 16, dtype)
        yield bench_latent, (4096, dtype)
    for shape in ((576, 576), (1536, 576), (49152, 576), (4096, 4096)):
        for rows in (1, 8, 32):
            yield bench_linear, (*shape, rows, torch.bfloat16)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the smaller shape, a tenth of the time")
    parser.add_argument("--only", default="", help="a regular expression that a function and its shape must match")
    parser.add_argument("--cpu-time", action="store_true", help="one thread and its own time: others use the machine")
    parser.add_argument("--device", choices=ROWS, default="cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    clock = timed if args.device == "cpu" else timed_on_gpu
    if args.cpu_time:
        torch.set_num_threads(1)
        clock = partial(timed, clock=time.thread_time)
    most = peaks() if args.device == "cpu" else {}
    print(json.dumps(machine() | {name: f"{rate / 1e9:.1f} G/s" for name, rate in most.items()}))
    results, seconds = [], 2.0 if args.device == "cpu" else 0.3
    more = few_rows() if args.device == "cpu" and not args.quick else ()
    for bench, shape in [*jobs(args.device, args.quick), *more]:
        if not re.search(args.only, f"{bench.__name__} {shape}"):
            continue
        with torch.device(args.device):
            pairs = bench(*shape)
        for name, ours, other_name, other, *work in pairs:
            ms, other_ms = medians([clock(ours), clock(other)], 0.2 if args.quick else seconds)
            results.append({"op": name, "ms": ms, "against": other_name, "against_ms": other_ms})
            line = f"{name:<48} {ms * 1e3:>12.1f} us   {other_name:<11} {other_ms * 1e3:>12.1f} us"
            line = f"{line}   {other_ms / ms:>6.2f}x"
            for unit, amount in work if most else ():
                results[-1] |= {"of_peak": amount / ms * 1e3 / most[unit], "peak": unit}
                line += f"   {amount / ms / 1e6:>6.1f} G/s {results[-1]['of_peak']:>4.0%} of {unit}"
            print(line, flush=True)
    print(json.dumps({"machine": machine() | most, "results": results}))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
