"""Decisions when each layer is cut, and to how many slots. The engine carries them out, and `kvevict plan` counts by
them. They are free of tensors: NumPy numbers of slots [B], sums over all kv heads of a layer."""

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

    layer: int  # its number among those that evict
    slots: np.ndarray | None  # [B] the most slots to keep; None: all
    by: int  # the layer whose chosen slots it takes; by == layer: it chooses by its own scores
    final: bool = True  # False: a later layer of this call cuts it again


class Decision(NamedTuple):
    """The cuts after a layer was read. A layer without a cut waits, its new slots not stored yet."""

    scores: bool  # the layer chooses slots, so it has to be scored
    cuts: tuple[Cut, ...] = ()
    pooled: bool = False  # one ranking of all slots splits the sum of the cuts' slots among their layers


class Decisions:
    """Decisions of one call of the decoder with `layers` layers that evict.

    limit      (layer, slots [B] that it has) -> the most [B] that it may keep; None, or limit None: all
    has_tokens bool [B] rows with tokens in this call; a row without cannot observe, and keeps all slots
    bar        [B] the least score of a slot that stays, -inf: any; None: the policy has no threshold
    """

    asks = False  # whether layers call `ask`

    def __init__(
        self, policy: Policy, layers: int, limit: Limit | None, has_tokens: np.ndarray | bool = True,
        bar: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        self.policy, self.layers, self.limit, self.has_tokens, self.bar = policy, layers, limit, has_tokens, bar
        self.waiting: list[int] = []  # layers that wait for a later layer's choice
        self.chosen: np.ndarray | None = None  # slots of the last choice
        self.known: dict[int, np.ndarray | None] = {}  # layer -> result of `kept`

    def at(self, layer: int, alive: np.ndarray) -> Decision:
        """The decision now that `layer` was read, which has alive [B] slots."""
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
        """Note the preference [B] of a layer, if these decisions take preferences."""

    def kept(self, layer: int, alive: np.ndarray) -> np.ndarray | None:
        """The most slots [B] that the layer keeps of its alive [B] ones; None if no row loses any."""
        if layer not in self.known:
            slots = None if self.limit is None else self.limit(layer, alive)
            if slots is not None:
                slots = np.where(self.has_tokens, np.minimum(slots, alive), alive)
                slots = slots if self.bar is not None or (slots < alive).any() else None
            self.known[layer] = slots
        return self.known[layer]


class Cascade(Decisions):
    """Layers share all slots by their preferences (`LayerBudget.preference`): each layer that is read cuts the earlier
    ones again.

    Budgets only shrink until the last layer is read. The final ones equal those of a single cut over all layers: each
    earlier cut leaves one spare slot per head, because of rounding. After layer l, layers 0..l hold at most the budget
    of all layers, and one slot per head; with heads="ada" also slots that a head won and the average takes from it.

    share   preferences [layers, B], 0 for layers yet to come -> int [layers, B] slots
    cuts    bool [B] rows that lose slots
    """

    asks = True

    def __init__(
        self, policy: Policy, layers: int, heads: int, share: Callable[[np.ndarray], np.ndarray], cuts: np.ndarray
    ) -> None:
        super().__init__(policy, layers, None)
        self.heads, self.share, self.cuts = heads, share, cuts
        self.preferences = np.zeros((layers, len(cuts)))

    def ask(self, layer: int, preference: np.ndarray) -> None:
        # At least 1e-300, so that a layer that asks for 0 outranks layers that were not read yet.
        self.preferences[layer] = np.maximum(np.nan_to_num(preference, nan=0.0), 1e-300)

    def at(self, layer: int, alive: np.ndarray) -> Decision:
        final = layer == self.layers - 1
        slots = self.share(self.preferences) + (0 if final else self.heads)
        slots = np.where(self.cuts, slots, PLENTY)
        return Decision(True, tuple(Cut(each, slots[each], each, final) for each in range(layer + 1)))


class RankedTogether(Decisions):
    """All layers wait for the last one; then one ranking of all slots splits the sum of `targets` among the layers.

    targets   int [layers, B] each layer's part of the sum
    cuts      bool [B] rows that lose slots
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
    """The decisions for a decoded token. budgets: layer -> its budget [B]; heads: kv heads of a layer."""

    def limit(layer: int, alive: np.ndarray) -> np.ndarray | None:
        over = overfull(policy, alive, budgets(layer), heads)
        return np.where(over, budgets(layer), alive) if over.any() else None

    return Decisions(policy, layers, limit)
