"""The idea on one screen: after a layer's attention over a chunk, score the alive slots, give every head its number,
select, and move the survivors of [stored | new] together. `view` is a `kvevict.view.View` of the layer."""

import torch

from .heads import HEADS
from .selections import SELECTIONS


def choose(view, keep):
    """Indices [B, Hkv, max keep] of the slots to keep, by the policy's score and selection."""
    policy = view.policy
    first, last = view.protected
    score = policy.score.score(view)
    if score.shape[1] != view.n.shape[1]:  # one selection shared by the layer's heads
        score = score.expand(-1, view.n.shape[1], -1)
    with view.step.patch.clock("select"):
        return SELECTIONS[policy.select](score.contiguous(), view.n, keep, first, last, int(keep.max()))


def evict(view, slots) -> None:
    """Cut the layer, and the layers that wait for it, back to `slots` [B] per head; None keeps everything."""
    n = view.n
    keep = n if slots is None else HEADS[view.policy.heads](slots, n)
    if not view.decoding:  # a row whose chunk is all padding has no rows that could observe
        keep = torch.where(view.has_tokens[:, None], keep, n)
    if bool((keep < n).any()):
        index = choose(view, keep)
        for waiting in view.step.waiting:
            waiting.store(index, keep)
        view.store(index, keep)
    else:
        for waiting in view.step.waiting:
            waiting.store()
        view.store()
    view.step.waiting.clear()


def after_chunk(view) -> None:
    """The end of one layer's attention over a chunk."""
    step, policy, score = view.step, view.policy, view.policy.score
    if score.carries:
        view.grow_carry(score.increment(view))
    order, slots = step.patch.order[view.index], None
    if step.last or policy.schedule == "chunk":
        relaxed = policy.warmup_layers is not None and order < step.patch.waiting_layers and not step.last
        slots = step.read.warmup if relaxed else step.read.targets[order]
    if not view.waits:
        score.observe(view)
    elif slots is not None and bool((slots[:, None] < view.n).any()):
        view.q = view.lse = None  # the choice is another layer's: only keys and values wait
        step.waiting.append(view)
        return
    evict(view, slots)


def after_append(view) -> None:
    """The end of one layer's attention over tokens that are stored as they are (assisted decoding's candidates)."""
    if view.policy.score.carries:
        view.grow_carry(view.policy.score.increment(view))
    view.store()


def after_token(view) -> None:
    """The end of one layer's attention over a decoded token, which is stored already."""
    policy, layer = view.policy, view.layer
    if policy.score.carries:
        view.grow_carry(view.probs)
    layer.carry = view.carry
    if not policy.decode:
        return
    if policy.score.rows and not view.waits:
        q = view.q if layer.recent is None else torch.cat([layer.recent, view.q], 2)
        layer.recent = q[:, :, -policy.score.rows :]
    n = view.n.amax(1)
    full = n > layer.budget + policy.interval - 1
    if bool(full.any()):
        if view.waits:
            view.step.waiting.append(view)
        else:
            evict(view, torch.where(full, layer.budget, n))
