"""Slots of several sequences in one pool: rows that are read and rows that are written lie in the same buffers."""

import pytest
import torch
from helpers import call, problem, same_bits
from test_compact import prepared
from test_decode import SLOTS, forked, step

from kvevict import _ops as ops

NAMES = ("k", "v", "pos")


def pooled(p, written, read, offset):
    """The arguments with the rows of the buffers `read` behind those of the buffers `written`, in one buffer."""
    rows = p[f"{NAMES[0]}{written}"].shape[0]
    both = {name: torch.cat([p[name + written], p[name + read]]) for name in NAMES if name + read in p}
    return p | {name + end: t for name, t in both.items() for end in (written, read)} | {offset: p[offset] + rows}


@pytest.mark.parametrize("seed", range(6))
def test_slots_move_within_a_pool(seed):
    p = prepared(problem(seed, T=5, first=0), seed)
    apart, together = (
        p | {f"{name}_dst": p[f"{name}_dst"].clone() for name in NAMES},
        pooled(p, "_dst", "_src", "src_offset"),
    )
    call(ops.compact, apart)
    before = {name: together[f"{name}_src"].clone() for name in NAMES}
    call(ops.compact, together)
    rows = len(p["k_dst"])
    for name in NAMES:
        assert same_bits(together[f"{name}_dst"][:rows], apart[f"{name}_dst"])
        assert same_bits(together[f"{name}_src"][rows:], before[name][rows:])


@pytest.mark.parametrize("seed", range(6))
def test_a_prefix_of_the_same_pool(seed):
    p = forked(step(seed), seed)
    rows = len(p["k_slots"])
    apart = p | {name: p[name].clone() for name in SLOTS}
    both = {name: torch.cat([p[f"{name}_slots"], p[f"{name}_prefix"]]) for name in ("k", "v")}
    together = p | {f"{name}_{end}": t for name, t in both.items() for end in ("slots", "prefix")}
    together |= dict(pos_slots=torch.cat([p["pos_slots"]] * 2), prefix_offset=p["prefix_offset"] + rows)
    for got, want in zip(call(ops.decode, together), call(ops.decode, apart), strict=True):
        assert same_bits(got, want)
    for name in SLOTS:
        assert same_bits(together[name][:rows], apart[name])


@pytest.mark.parametrize("b", range(2))
def test_rows_that_are_read_are_not_written(b):
    p = pooled(prepared(problem(1, T=5, first=0, lens=[[9, 4]]), 1, kept=lambda n: n), "_dst", "_src", "src_offset")
    offset = p["dst_offset"].clone()
    offset[b, 0] = p["src_offset"][1 - b, 1] - 1
    with pytest.raises(RuntimeError, match="share memory"):
        call(ops.compact, p | dict(dst_offset=offset))
    p = step(1, lens=[[9, 4]]) | dict(columns=0)
    prefix = dict(k_prefix=p["k_slots"], v_prefix=p["v_slots"], prefix_offset=p["offset"].flip(0))
    call(ops.decode, p | prefix | dict(prefix_len=p["len"].flip(0)))
    with pytest.raises(RuntimeError, match="share memory"):
        call(ops.decode, p | prefix | dict(prefix_len=p["len"].flip(0) + 1))
