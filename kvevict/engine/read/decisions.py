"""Decisions when each layer is cut, and to how many slots. The engine carries the decisions out, and `kvevict plan`
counts slots by them. There are no tensors here: a number of slots is a NumPy array [B], over all kv heads of a
layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ...policy.checks import PLENTY
from .schedule import follows, overfull, waits

if TYPE_CHECKING:
    from ...policy.policy import Policy

Limit = Callable[[int, np.ndarray], np.ndarray | None]


class Cut(NamedTuple):
    """One layer to cut, now that this layer or a later one was read."""

    layer: int  # the layer's number among those that evict
    slots: np.ndarray | None  # [B] largest number of slots to keep; None: all
    by: int  # number of the layer whose choice of slots is used; by == layer: the layer chooses by its own scores
    final: bool = True  # False: when a later layer of this call has been read, the layer is cut again


class Decision(NamedTuple):
    """The cuts to make now that a layer was read. If no cut is of this layer, the layer waits, and its new slots are
    not stored yet."""

    scores: bool  # whether the layer that was read chooses slots, so that it has to be scored
    cuts: tuple[Cut, ...] = ()
    pooled: bool = False  # one ranking of the slots of all `cuts` splits the sum of their `slots` among the layers


class Decisions:
    """Decisions of one call of the decoder with `layers` layers that evict.

    limit      (layer, [B] slots that it holds) -> [B] largest number of slots that it may keep, or None: all. limit
               None: every layer keeps all
    has_tokens bool [B] batch rows with tokens in this call; a batch row without tokens keeps all slots
    bar        [B] least score of a slot that stays, -inf for no threshold; None: the policy has none
    """

    asks = False  # whether `ask` is to be called for each layer

    def __init__(
        self, policy: Policy, layers: int, limit: Limit | None, has_tokens: np.ndarray | bool = True,
        bar: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        self.policy, self.layers, self.limit, self.has_tokens, self.bar = policy, layers, limit, has_tokens, bar
        self.waiting: list[int] = []  # layers that wait for a later layer's choice
        self.chosen: np.ndarray | None = None  # [B] number of slots kept by the last choice; None: all
        self.known: dict[int, np.ndarray | None] = {}  # layer -> result of `kept`

    def at(self, layer: int, alive: np.ndarray) -> Decision:
        """Return the decision to carry out now that `layer`, which holds alive [B] slots, was read."""
        if follows(self.policy, layer):
            return Decision(False, (Cut(layer, self.chosen, layer - layer % self.policy.n_reuse),))
        slots = self.kept(layer, alive)
        if waits(self.policy, layer, self.layers):
            if slots is None:
                return Decision(False, (Cut(layer, None, layer),))
            self.waiting.append(layer)
            return Decision(False)
        self.chosen, waiting, self.waiting = slots, self.waiting, []
        return Decision(slots is not None, tuple(Cut(each, slots, layer) for each in (layer, *waiting)))

    def ask(self, layer: int, preference: np.ndarray) -> None:
        """Note the preference [B] of a layer: its share of the budget relative to the other layers' preferences. Only
        `Cascade` uses preferences."""

    def kept(self, layer: int, alive: np.ndarray) -> np.ndarray | None:
        """Return the largest number of slots [B] that the layer keeps of its alive [B] slots; None if no batch row
        loses any."""
        if layer not in self.known:
            slots = None if self.limit is None else self.limit(layer, alive)
            if slots is not None:
                slots = np.where(self.has_tokens, np.minimum(slots, alive), alive)
                slots = slots if self.bar is not None or (slots < alive).any() else None
            self.known[layer] = slots
        return self.known[layer]


class Cascade(Decisions):
    """Decisions that split the budget of all layers by the layers' preferences (`LayerBudget.preference`). Whenever a
    layer has been read, the earlier layers are cut again.

    A layer's share only shrinks until the last layer is read. The final slots equal those of a single cut over all
    layers, because each earlier cut leaves one spare slot per head for rounding. After layer l, layers 0..l hold
    at most the budget of all layers, and one more slot per head; with heads="ada" a head may also hold slots that it
    won and that the mix with the average takes from it later.

    share   preferences [layers, B], 0 for layers not read yet -> int [layers, B] slots
    cuts    bool [B] batch rows that lose slots
    """

    asks = True

    def __init__(
        self, policy: Policy, layers: int, heads: int, share: Callable[[np.ndarray], np.ndarray], cuts: np.ndarray
    ) -> None:
        super().__init__(policy, layers, None)
        self.heads, self.share, self.cuts = heads, share, cuts
        self.preferences = np.zeros((layers, len(cuts)))

    def ask(self, layer: int, preference: np.ndarray) -> None:
        # At least 1e-300, so that a layer that asks for 0 still outranks the layers not read yet.
        self.preferences[layer] = np.maximum(np.nan_to_num(preference, nan=0.0), 1e-300)

    def at(self, layer: int, alive: np.ndarray) -> Decision:
        final = layer == self.layers - 1
        slots = self.share(self.preferences) + (0 if final else self.heads)
        slots = np.where(self.cuts, slots, PLENTY)
        return Decision(True, tuple(Cut(each, slots[each], each, final) for each in range(layer + 1)))


class RankedTogether(Decisions):
    """Decisions for which all layers wait until the last one is read; then one ranking of all layers' slots splits the
    sum of `targets` among the layers.

    targets   int [layers, B] each layer's part of the sum
    cuts      bool [B] batch rows that lose slots
    """

    def __init__(
        self, policy: Policy, layers: int, targets: np.ndarray, cuts: np.ndarray, bar: np.ndarray | None
    ) -> None:
        super().__init__(policy, layers, None, bar=bar)
        self.targets = np.where(cuts, targets, PLENTY)

    def at(self, layer: int, alive: np.ndarray) -> Decision:
        if layer < self.layers - 1:
            return Decision(True)
        return Decision(True, tuple(Cut(each, self.targets[each], each) for each in range(self.layers)), True)


def while_decoding(policy: Policy, layers: int, heads: int, budgets: Callable[[int], np.ndarray]) -> Decisions:
    """Return the decisions for a decoded token. budgets: layer -> its budget [B]; heads: number of kv heads of a
    layer."""

    def limit(layer: int, alive: np.ndarray) -> np.ndarray | None:
        over = overfull(policy, alive, budgets(layer), heads)
        return np.where(over, budgets(layer), alive) if over.any() else None

    return Decisions(policy, layers, limit)
