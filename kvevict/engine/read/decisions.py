"""When each layer is cut, and to how many slots. The engine carries the decisions out, and `kvevict plan` counts by
them. Free of tensors: NumPy numbers, per row of the batch, over all kv heads of a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...policy.checks import PLENTY
from .schedule import follows, overfull, waits

if TYPE_CHECKING:
    from ...policy.policy import Policy


class Cut(NamedTuple):
    """A layer to store, or to cut, after the read of a layer (the same or a later one)."""

    layer: int  # its number among those that evict
    slots: np.ndarray | None  # [B] the most slots to keep; None: all
    by: int  # the layer that chooses the slots; itself: ranked by its numbers
    final: bool = True  # False: a later layer of this call cuts it again


class Decision(NamedTuple):
    """The cuts after a layer was read. A layer that is not in a cut yet waits, its new slots beside the stored ones."""

    scores: bool  # the layer chooses, so its slots get numbers
    cuts: tuple = ()
    pooled: bool = False  # the cuts' layers keep the sum of their slots, split by one ranking


class Decisions:
    """Decisions of one call of the decoder.

    limit      (layer, slots [B] that it has) -> the most [B] that it may keep; None: all
    has_tokens [B] True if a row has tokens in this call; a row without them cannot observe, and keeps all slots
    bar        [B] the least score of a slot that stays, -inf: any; None: the policy has no threshold
    """

    asks = False  # takes the layers' preferences: `ask`

    def __init__(self, policy: Policy, layers: int, limit: Any, has_tokens: Any = True, bar: Any = None) -> None:
        self.policy, self.layers, self.limit, self.has_tokens, self.bar = policy, layers, limit, has_tokens, bar
        self.waiting: list = []  # layers that wait for a later layer's choice
        self.chosen: np.ndarray | None = None  # slots of the last choice
        self.known: dict = {}  # layer -> result of `kept`

    def at(self, layer: int, alive: np.ndarray) -> Decision:
        """The decision after `layer`, with alive [B] slots, was read."""
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

    def kept(self, layer: int, alive: np.ndarray) -> np.ndarray | None:
        """[B] the most that the layer keeps of its alive [B] slots; None if no row loses any."""
        if layer not in self.known:
            slots = self.limit(layer, alive)
            if slots is not None:
                slots = np.where(self.has_tokens, np.minimum(slots, alive), alive)
                slots = slots if self.bar is not None or (slots < alive).any() else None
            self.known[layer] = slots
        return self.known[layer]


class Cascade(Decisions):
    """Layers share all slots by their preferences (`LayerBudget.preference`), and are cut again as later layers ask.

    Budgets only shrink until the last layer is read. The final budgets equal those of a single cut over all layers: to
    allow for rounding, each earlier cut leaves one spare slot per head. After layer l, layers 0..l hold at most C slots
    and one per head; with heads="ada" also slots that a head won and the average takes from it.

    share   preferences [layers, B], 0 for layers yet to come -> int [layers, B] slots
    cuts    bool [B] rows that lose slots
    """

    asks = True

    def __init__(self, policy: Policy, layers: int, heads: int, share: Any, cuts: np.ndarray) -> None:
        super().__init__(policy, layers, None)
        self.heads, self.share, self.cuts = heads, share, cuts
        self.preferences = np.zeros((layers, len(cuts)))

    def ask(self, layer: int, preference: np.ndarray) -> None:
        """A layer asks for preference [B] in proportion to the others."""
        self.preferences[layer] = np.maximum(np.nan_to_num(preference, nan=0.0), 1e-300)  # even 0 comes before unread

    def at(self, layer: int, alive: np.ndarray) -> Decision:
        final = layer == self.layers - 1
        slots = self.share(self.preferences) + (0 if final else self.heads)
        slots = np.where(self.cuts, slots, PLENTY)
        return Decision(True, tuple(Cut(each, slots[each], each, final) for each in range(layer + 1)))


class Pooled(Decisions):
    """All layers wait for the last one; then one ranking of all slots splits the sum of `targets` among the layers.

    targets   int [layers, B] slots that count as each layer's part
    cuts      bool [B] rows that lose slots
    """

    def __init__(self, policy: Policy, layers: int, targets: np.ndarray, cuts: np.ndarray, bar: Any = None) -> None:
        super().__init__(policy, layers, None, bar=bar)
        self.targets = np.where(cuts, targets, PLENTY)

    def at(self, layer: int, alive: np.ndarray) -> Decision:
        if layer < self.layers - 1:
            return Decision(True)
        return Decision(True, tuple(Cut(each, self.targets[each], each) for each in range(self.layers)), True)


def while_decoding(policy: Policy, layers: int, heads: int, budgets: Callable[[int], np.ndarray]) -> Decisions:
    """Decisions for a decoded token, by the layers' budgets [B]."""

    def limit(layer: int, alive: np.ndarray) -> Any:
        over = overfull(policy, alive, budgets(layer), heads)
        return np.where(over, budgets(layer), alive) if over.any() else None

    return Decisions(policy, layers, limit)
