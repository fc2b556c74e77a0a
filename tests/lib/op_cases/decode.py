"""Arguments of `decode`, and its result against the oracle's."""

import random

import helpers
import ref
import torch
from helpers import FP32, OUT, call, close, same_bits
from problems import copied, i32, problem

from kvevict.ops import _ops as ops

SLOTS = ("held_k", "held_v", "held_pos")
PREFIX = dict.fromkeys(["prefix_k", "prefix_v", "prefix_offset", "prefix_len"])


def prepared(p, probs=True):
    return {**p, **PREFIX, "columns": int(p["held_len"].max()) + 3 if probs else 0}


def forked(p, seed=1):
    """The same slots, some of each head's first ones in a prefix."""
    rng = random.Random(seed)
    length = p["held_len"]
    part = i32([rng.choice([0, 1, n // 2, n, n]) for n in length.flatten().tolist()]).view_as(length).minimum(length)
    prefix = dict(prefix_k=p["held_k"].clone(), prefix_v=p["held_v"].clone(), prefix_offset=p["held_offset"])
    prefix |= dict(prefix_k_kind=p["held_k_kind"], prefix_v_kind=p["held_v_kind"])
    return {**p, **prefix, "prefix_len": part, "held_offset": p["held_offset"] + part, "held_len": length - part}


def sharing(p, texts, n, less=0):
    """(p, p with its first slots in a prefix, the same with one prefix for all rows of a text): batch row b is about
    text texts[b], and its first n[text, h] - less[b, h] slots become those of the text's first row."""
    first, n, p = [texts.index(text) for text in texts], (n[texts] - less).clamp_min(0), copied(p, *SLOTS)
    if p["held_centre"] is not None:
        p["held_centre"] = p["held_centre"][first]
    for name in ("held_k", "held_v"):
        for at, source, count in zip(*(x.flatten().tolist() for x in (p["held_offset"], p["held_offset"][first], n))):
            p[name][at : at + count] = p[name][source : source + count]
    prefix = dict(prefix_k=p["held_k"].clone(), prefix_v=p["held_v"].clone(), prefix_len=n)
    prefix |= dict(prefix_k_kind=p["held_k_kind"], prefix_v_kind=p["held_v_kind"], prefix_offset=p["held_offset"])
    apart = {**p, **prefix, "held_offset": p["held_offset"] + n, "held_len": p["held_len"] - n}
    return p, apart, {**apart, "prefix_offset": p["held_offset"][first]}


def step(seed, **options):
    return prepared(problem(seed, T=1, first=0, **options))


def check(p):
    got, want = copied(p, *SLOTS), copied(p, *SLOTS)
    (out, lse, probs), (want_out, want_lse, want_probs) = call(ops.decode, got), call(ref.decode, want)
    assert out.dtype == p["q"].dtype and lse.dtype == torch.float32 and probs.dtype == torch.float32
    close(out, want_out, OUT[out.dtype])
    close(lse, want_lse, FP32, least=1.0)
    close(probs, want_probs, 2 * FP32)
    assert all(same_bits(got[name], want[name]) for name in SLOTS)  # the new rows written, every other bit as it was
    shared = copied(forked(p), *SLOTS)
    results = call(ops.decode, shared)
    assert all(same_bits(shared[name], want[name]) for name in SLOTS)
    if helpers.device.type == "cpu" and ops.cpu_isa() != "CUDA on a CPU":  # where the slots lie changes no bit
        assert all(same_bits(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(results, (out, lse, probs), strict=True))
    else:
        close(results[0], want_out, OUT[out.dtype])
        close(results[1], want_lse, FP32, least=1.0)
        close(results[2], want_probs, 2 * FP32)
    return out, lse, probs
