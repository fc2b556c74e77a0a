"""Arguments of `compact`, and its result against the oracle's."""

import random

import ref
import torch
from helpers import call, same_bits
from problems import NAN, copied, i32, scattered

from kvevict.ops import _ops as ops
from kvevict.ops._native import PARTS

DST = ("dst_k", "dst_v", "dst_pos")


def poisoned(held, rows):
    return held.new_full((rows, held.shape[1]), 255 if held.dtype == torch.uint8 else NAN)


def prepared(p, seed, kept=None, room=1):
    """A random ascending index over [stored | new], and a poisoned destination with gaps."""
    rng = random.Random(seed)
    n = p["held_len"] + (p["k"].shape[2] - p["first"])[:, None]
    keep = (
        i32([[rng.choice([0, m, rng.randint(0, m)]) for m in row] for row in n.tolist()]) if kept is None else kept(n)
    )
    index = torch.full((*n.shape, int(keep.max()) + rng.randrange(3)), -1, dtype=torch.int32)
    for b in range(n.shape[0]):
        for h in range(n.shape[1]):
            index[b, h, : keep[b, h]] = i32(sorted(rng.sample(range(int(n[b, h])), int(keep[b, h]))))
    dst_offset, rows = scattered(rng, keep, room)
    return {
        **{name: p[name] for name in ("k", "v", "pos", "first")},
        **{f"src_{part}": p[f"held_{part}"] for part in PARTS},
        **{"index": index, "keep": keep, "dst_offset": dst_offset},
        **{f"dst_{name}": poisoned(p[f"held_{name}"], rows) for name in "kv"},
        **{f"dst_{name}_kind": p[f"held_{name}_kind"] for name in "kv"},
        "dst_pos": torch.full((rows,), -9, dtype=torch.int32),
    }


def check(p):
    """Bit for bit: nothing is computed. The gaps of the destination are poison on both sides."""
    got, want = copied(p, *DST), copied(p, *DST)
    call(ops.compact, got)
    call(ref.compact, want)
    assert all(same_bits(got[name], want[name]) for name in DST)
