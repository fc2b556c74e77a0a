"""Which layers are cut when, and to how many slots: the engine carries it out, and `kvevict plan` counts by it. Free of
tensors: numbers are NumPy's, per row of the batch, over all kv heads of a layer."""

from typing import NamedTuple

import numpy as np

from ...policy.checks import PLENTY
from .schedule import follows, overfull, waits


class Cut(NamedTuple):
    """A layer that is stored, or cut, once another one was read."""

    layer: int  # its number among those that evict
    slots: np.ndarray | None  # [B] the most that it keeps; None: all
    by: int  # the layer whose choice of slots it takes; itself: it is ranked by its own numbers
    final: bool = True  # False: a later layer of this call has it cut again


class Decision(NamedTuple):
    """What follows when a layer was read. A layer that is in no cut yet waits, its new slots beside the stored ones."""

    scores: bool  # it chooses, so its slots get numbers
    cuts: tuple = ()
    pooled: bool = False  # the cuts' layers keep their slots' sum, split by one ranking


class Decisions:
    """Of one call of the decoder.

    limit      (layer, slots [B] that it has) -> the most [B] that it may keep; None: all
    has_tokens [B] whether a row has tokens in this call: one without has no rows that could observe, and keeps all
    bar        [B] the least that a row's slots must score to stay, -inf: anything; None: the policy has no threshold
    """

    asks = False  # takes what each layer asks for: `ask`

    def __init__(self, policy, layers: int, limit, has_tokens=True, bar=None):
        self.policy, self.layers, self.limit, self.has_tokens, self.bar = policy, layers, limit, has_tokens, bar
        self.waiting: list = []  # layers that wait for a later one's choice
        self.chosen = None  # slots of the last choice
        self.known: dict = {}  # layer -> what `kept` found

    def at(self, layer: int, alive) -> Decision:
        """When `layer`, which has alive [B] slots, was read."""
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

    def kept(self, layer, alive):
        """[B] the most that the layer keeps of its alive [B] slots; None where no row loses any."""
        if layer not in self.known:
            slots = self.limit(layer, alive)
            if slots is not None:
                slots = np.where(self.has_tokens, np.minimum(slots, alive), alive)
                slots = slots if self.bar is not None or (slots < alive).any() else None
            self.known[layer] = slots
        return self.known[layer]


class Cascade(Decisions):
    """Layers share all slots by what each asks for (`LayerBudget.preference`), and are cut again as later ones ask.

    Budgets only shrink until the last layer is read. What is left then is what all layers would keep if none had been
    cut before: a cut that is not final leaves every head one slot more than its budget, since rounding may give it that
    back. After layer l, layers 0..l hold at most C slots and one per head; with heads="ada" also those that a head won
    and the average takes from it.

    share   preferences [layers, B], 0 of layers yet to come -> int [layers, B] slots
    cuts    bool [B] rows that lose slots
    """

    asks = True

    def __init__(self, policy, layers, heads, share, cuts):
        super().__init__(policy, layers, None)
        self.heads, self.share, self.cuts = heads, share, cuts
        self.preferences = np.zeros((layers, len(cuts)))

    def ask(self, layer: int, preference) -> None:
        """A layer asks for preference [B] in proportion to the others."""
        self.preferences[layer] = np.maximum(np.nan_to_num(preference, nan=0.0), 1e-300)  # even 0 comes before unread

    def at(self, layer, alive):
        final = layer == self.layers - 1
        slots = self.share(self.preferences) + (0 if final else self.heads)
        slots = np.where(self.cuts, slots, PLENTY)
        return Decision(True, tuple(Cut(each, slots[each], each, final) for each in range(layer + 1)))


class Pooled(Decisions):
    """All layers wait for the last one; then one ranking of all slots says what each keeps of the sum of `targets`.

    targets   int [layers, B] slots, which count as each layer's own
    cuts      bool [B] rows that lose slots
    """

    def __init__(self, policy, layers, targets, cuts, bar=None):
        super().__init__(policy, layers, None, bar=bar)
        self.targets = np.where(cuts, targets, PLENTY)

    def at(self, layer, alive):
        if layer < self.layers - 1:
            return Decision(True)
        return Decision(True, tuple(Cut(each, self.targets[each], each) for each in range(self.layers)), True)


def while_decoding(policy, layers: int, heads: int, budgets) -> Decisions:
    """Of a decoded token, by the layers' budgets [B]."""

    def limit(layer, alive):
        over = overfull(policy, alive, budgets(layer), heads)
        return np.where(over, budgets(layer), alive) if over.any() else None

    return Decisions(policy, layers, limit)
