"""Slots of several sequences in one pool: rows that are read and rows that are written lie in the same buffers."""

import pytest
import torch
from helpers import call, same_bits
from op_cases.compact import DST, prepared
from op_cases.decode import SLOTS, forked, step
from problems import problem

from kvevict.ops import _ops as ops


def pooled(p, written, read, names):
    """The arguments with the rows that are read after those that are written, in one set of buffers."""
    both = {name: torch.cat([p[f"{written}_{name}"], p[f"{read}_{name}"]]) for name in names}
    place = {f"{read}_offset": p[f"{read}_offset"] + len(p[f"{written}_k"])}
    return p | {f"{end}_{name}": t for name, t in both.items() for end in (written, read)} | place


@pytest.mark.parametrize("seed", range(6))
def test_slots_move_within_a_pool(seed):
    p = prepared(problem(seed, T=5, first=0), seed)
    apart, together, rows = p | {name: p[name].clone() for name in DST}, None, len(p["dst_k"])
    call(ops.compact, apart)
    together = pooled(p, "dst", "src", ("k", "v", "pos"))
    before = {name: together[name].clone() for name in DST}
    call(ops.compact, together)
    for name in DST:
        assert same_bits(together[name][:rows], apart[name]) and same_bits(together[name][rows:], before[name][rows:])


@pytest.mark.parametrize("seed", range(6))
def test_a_prefix_of_the_same_pool(seed):
    p = forked(step(seed), seed)
    apart, rows = p | {name: p[name].clone() for name in SLOTS}, len(p["held_k"])
    together = pooled(p, "held", "prefix", ("k", "v")) | dict(held_pos=torch.cat([p["held_pos"]] * 2))
    for got, want in zip(call(ops.decode, together), call(ops.decode, apart), strict=True):
        assert same_bits(got, want)
    for name in SLOTS:
        assert same_bits(together[name][:rows], apart[name])


@pytest.mark.parametrize("b", range(2))
def test_rows_that_are_read_are_not_written(b):
    p = prepared(problem(1, T=5, first=0, lens=[[9, 4]]), 1, kept=lambda n: n)
    p = pooled(p, "dst", "src", ("k", "v", "pos"))
    offset = p["dst_offset"].clone()
    offset[b, 0] = p["src_offset"][1 - b, 1] - 1
    with pytest.raises(RuntimeError, match="share memory"):
        call(ops.compact, p | dict(dst_offset=offset))
    p = step(1, lens=[[9, 4]]) | dict(columns=0)
    prefix = dict(prefix_k=p["held_k"], prefix_v=p["held_v"], prefix_offset=p["held_offset"].flip(0))
    call(ops.decode, p | prefix | dict(prefix_len=p["held_len"].flip(0)))
    with pytest.raises(RuntimeError, match="share memory"):
        call(ops.decode, p | prefix | dict(prefix_len=p["held_len"].flip(0) + 1))
