"""The idea on one screen: after a layer's attention over a chunk, score the alive slots, give every head its number,
select, and move the survivors of [stored | new] together. `view` is a `kvevict.engine.view.View` of the layer."""

import numpy as np
import torch

from .. import _ops
from ..analysis import diagnose
from . import host, propagate


def ranked(view, score):
    """What slots are chosen by: a score pooled, refined, and made one of runs where those are selected. [B, Hkv, C]"""
    policy = view.policy
    pooled = policy.score.pooled(view, score)
    if policy.error.refines:  # protected slots have a share in it, by the scores that they have
        pooled = torch.where(view.competing, pooled, score)
    score = policy.error.refine(view, pooled)
    with view.step.patch.clock("select"):
        return view.select.rank(view, score.expand(-1, view.n.shape[1], -1)).contiguous()


def choose(view, score, slots, again=False):
    """(index [B, Hkv, C], keep [B, Hkv] on the host): which slots survive and how many of each head, by `ranked` scores
    and the slots [B] that the layer may keep. again: enough survive for a later choice, of fewer slots, to be as from
    all."""
    heads, slots = view.policy.heads, host.upload(slots, view.device)
    with view.step.patch.clock("select"):
        if again:
            keep = heads.reserve(view, score, slots)
        else:
            keep = view.select.whole(view, score, heads.keep(view, score, slots))
        on_host = np.array(keep.tolist())
        return _ops.select(score, view.n, keep, *view.protected, int(on_host.max())), on_host


def within(view, slots):
    """The slots [B] that a layer keeps of those it has, where it may keep `slots`; None: all."""
    alive = view.counts.sum(1)
    slots = alive if slots is None else np.minimum(slots, alive)
    # A row whose chunk is all padding has no rows that could observe.
    return slots if view.decoding else np.where(view.padding < view.k.shape[2], slots, alive)


def evict(view, slots) -> None:
    """Cut the layer, and the layers that wait for it, back to `slots` [B] in all; None keeps everything."""
    slots, step = within(view, slots), view.step
    cuts = (slots < view.counts.sum(1)).any()
    measures, propagates = step.measured is not None, propagate.due(view)
    score = view.policy.score.score(view) if cuts or measures or propagates else None
    if measures:  # the part of the layer's error that its scores are (METHODS section 4, E_int)
        every = view.policy.error.refine(view, score.expand(-1, view.n.shape[1], -1).contiguous())
        step.measured[view.index] = every.masked_fill(~view.competing, 0).double().sum((1, 2))
    if propagates:
        propagate.choose(view, score)
    step.choice = choose(view, ranked(view, score), slots) if cuts else None
    for each in [*step.waiting, view]:
        each.store(step.choice)
    step.waiting.clear()


def after_chunk(view) -> None:
    """The end of one layer's attention over a chunk."""
    step, policy, score = view.step, view.policy, view.policy.score
    if step.held is not None:
        view.hold(score.held)
        return
    if step.cascade is not None:
        step.cascade.cut(view)
        return
    if view.follows:
        view.store(step.choice)
        return
    if score.carries:
        view.grow_carry(score.increment(view))
    slots = None
    if step.last or policy.schedule == "chunk":
        relaxed = policy.warmup_layers is not None and view.order < step.patch.waiting_layers and not step.last
        slots = step.read.warmup if relaxed else step.read.targets[view.order]
    if not view.waits:
        score.observe(view)
    elif slots is not None and (slots < view.counts.sum(1)).any():
        view.q = diagnose.rows(view) if policy.diagnose else None
        view.lse = view.out = None  # the choice is another layer's: only keys and values wait
        step.waiting.append(view)
        return
    evict(view, slots)


def after_append(view) -> None:
    """The end of one layer's attention over tokens that are stored as they are (assisted decoding's candidates)."""
    if view.policy.score.carries and not view.follows:
        view.grow_carry(view.policy.score.increment(view))
    view.store()


def after_token(view) -> None:
    """The end of one layer's attention over a decoded token, which is stored already."""
    policy, layer = view.policy, view.layer
    if policy.score.carries and not view.follows:
        view.grow_carry(view.probs)
    layer.carry = view.carry
    if not policy.decode:
        return
    if view.follows:
        if view.step.choice is not None:
            view.store(view.step.choice)
        return
    if policy.score.rows and not view.waits:
        row = torch.cat([view.q, view.out.transpose(1, 2)], 3) if policy.wants_outputs else view.q
        other = layer.recent is None or layer.recent.shape[3] != row.shape[3]  # of another policy
        rows = row if other else torch.cat([layer.recent, row], 2)
        layer.recent = rows[:, :, -policy.score.rows :]
    if not view.waits:
        view.step.choice = None  # a group's before this one
    n = view.counts.sum(1)
    full = n > layer.budget + (policy.interval - 1) * view.n.shape[1]
    if full.any():
        if view.waits:
            view.step.waiting.append(view)
        else:
            evict(view, np.where(full, layer.budget, n))
