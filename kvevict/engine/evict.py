"""The idea on one screen: after a layer's attention over a chunk, score the alive slots, give every head its number,
select, and move the survivors of [stored | new] together. `view` is a `kvevict.engine.view.View` of the layer."""

from typing import NamedTuple

import numpy as np
import torch

from .. import _ops
from ..analysis import diagnose
from . import host, rerotate


def ranked(view, score):
    """What slots are chosen by: a score pooled, refined, and made one of runs where those are selected. [B, Hkv, C]"""
    policy = view.policy
    pooled = policy.score.pooled(view, score)
    if policy.refine.refines:  # protected slots have a share in it, by the scores that they have
        pooled = torch.where(view.competing, pooled, score)
    score = policy.refine.refine(view, pooled)
    score = score.expand(-1, view.n.shape[1], -1)
    with view.step.meter.clock("select"):
        if not view.select.shared:
            return view.select.rank(view, score).contiguous()
        return view.ranks.mine(view.select.rank(view.whole, view.gather(score))).contiguous()


class Choice(NamedTuple):
    """Which slots of a layer survive."""

    index: torch.Tensor  # type: ignore[assignment]  # [B, Hkv, K] ascending; a tuple has a method of that name
    keep: np.ndarray  # [B, Hkv] how many of each head, on the host
    every: np.ndarray  # the same of all ranks' heads


def choose(view, score, slots, again=False) -> Choice:
    """Which slots survive, by `ranked` scores and the slots [B] that the layer may keep. again: enough survive for a
    later choice, of fewer slots, to be as from all."""
    heads, slots, whole = view.policy.heads, host.upload(slots, view.device), view.whole
    with view.step.meter.clock("select"):
        every = view.gather(score, whole.columns) if heads.ragged or view.select.spares else score
        if again:
            keep = heads.reserve(whole, every, slots)
        else:
            keep = view.select.whole(whole, every, heads.keep(whole, every, slots))
        counts = np.array(keep.tolist())
        keep, mine, (first, last) = view.ranks.mine(keep).contiguous(), view.ranks.mine(counts), view.protected
        return Choice(_ops.select(score, view.n, keep, first, last, int(mine.max())), mine, counts)


def within(view, slots):
    """The slots [B] that a layer keeps of those it has, where it may keep `slots`; None: all."""
    alive = view.every.sum(1)
    slots = alive if slots is None else np.minimum(slots, alive)
    # A row whose chunk is all padding has no rows that could observe.
    return slots if view.decoding else np.where(view.padding < view.k.shape[2], slots, alive)


def grow_carry(view) -> None:
    """Where scores are carried: those of the layer's slots, and what this call's rows add."""
    score, carried = view.policy.score, view.layer.carry
    if not score.carries:
        return
    view.carry = view.probs if view.decoding else score.increment(view)
    if carried is not None:
        view.carry = view.carry.clone()
        view.carry[..., : carried.shape[-1]] += carried


def store(view, choice=None) -> None:
    """Put the survivors into the layer: those of a `Choice`, or all."""
    layer, carry = view.layer, view.carry
    if choice is not None and view.policy.diagnose and view.step.read is not None:
        with rerotate.in_cache(view.step, view.module, view.slots):
            diagnose.note(view, choice)
    with view.step.meter.clock("compact"):
        if choice is not None:
            index = choice.index.to(view.device)  # another layer may have chosen, on its device
            layer.keep(index, choice.keep, *view.new, view.pos, view.first)
            view.ranks.note(layer, choice.every)
            carry = None if carry is None else carry.gather(2, index.clamp_min(0).long()).masked_fill(index < 0, 0)
        elif view.k.shape[2]:
            layer.append(*view.new, view.pos, view.first, view.padding)
        layer.carry = carry
    view.step.meter.live[view.index] = layer.live_bytes()
