"""Layers that are cut as soon as they are read, and again when a later one has shown what it asks for (CAKE)."""

import numpy as np
import torch

from ..policy.layers import layer_slots
from . import propagate
from .choosers import Chooser
from .evict import choose, ranked, store
from .view import View


class Cascade(Chooser):
    """The cuts of one chunk, layer by layer; layers that are yet to come have no share in C so far.

    A layer that joins takes from all others, so budgets only shrink until the last layer is read, and what is left then
    is what all layers would keep if none had been cut before. To that end a cut that is not the last leaves every head
    one slot more than its budget, since rounding may give it that back, and the scores that ranked a layer's slots stay
    with those that survive. After layer l, layers 0..l hold at most C slots and one per head; with heads="ada" also
    those that a head won and the average takes from it.
    """

    def __init__(self, budgets):
        self.budgets = budgets
        self.preferences = torch.zeros(budgets.alive.shape, dtype=torch.double, device="cpu")  # [layers, B]
        self.layers = []  # (view of the survivors, their ranked scores [B, Hkv, C]) of every layer so far

    def layer(self, view):
        """Cut it and all before it to their shares."""
        policy, budgets, last = view.policy, self.budgets, view.order == len(self.preferences) - 1
        policy.rows.note(view)
        preference = policy.layers.preference(view).cpu().nan_to_num(0.0)
        self.preferences[view.order] = preference.clamp_min(1e-300)  # even 0 comes before a layer that is not read yet
        score = policy.score.score(view)
        if propagate.due(view):
            self.onward = propagate.choose(view, score)
        self.layers.append((view, ranked(view, score)))
        shape = policy, len(self.preferences), view.every.shape[1]
        slots = layer_slots(*shape, budgets.seen, budgets.alive, self.preferences.T.tolist())
        for order, (part, scores) in enumerate(self.layers):
            self.layers[order] = self._cut(part, scores, slots[order].numpy(), last)

    def _cut(self, view, scores, slots, last):
        alive, cuts = view.every.sum(1), self.budgets.cuts
        if last:
            view.layer.budget = np.where(cuts, slots, view.layer.budget)
        wanted = np.where(cuts, slots if last else slots + view.every.shape[1], alive)
        wanted = np.minimum(wanted, alive)
        if (wanted < alive).any():
            choice = choose(view, scores, wanted, again=not last)
            store(view, choice)
            scores = scores.gather(2, choice.index.clamp_min(0).long())
        elif view.k.shape[2]:
            store(view)
        return _survivors(view), scores


def _survivors(view):
    """A view of what the layer has stored, with the same slots protected and nothing of the chunk kept alive."""
    none, new = view.k[:, :, :0], [x[:, :, :0] for x in view.new]
    left = View(view.step, view.layer, view.index, view.module, None, none, none, None, None, view.options, new=new)
    left.protected = view.protected
    return left
