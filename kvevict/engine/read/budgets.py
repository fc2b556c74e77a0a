"""The number of slots that each layer may keep after each chunk (METHODS section 4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...policy.checks import PLENTY
from ...policy.layers import layer_slots
from . import schedule
from .decisions import Cascade, Decisions, RankedTogether

if TYPE_CHECKING:  # these modules import Transformers, which `kvevict plan` does without
    from ...policy.policy import Policy
    from ..memory.cache import EvictionCache
    from ..memory.layer import EvictionLayer
    from ..memory.ranks import Ranks


class Budgets:
    """The number of slots that each layer may keep after each chunk of one prompt.

    narrow   result of `schedule.narrow`: one entry for each evicting layer
    heads    number of a layer's kv heads, over all ranks
    seen     number of tokens read in each batch row, this prompt included
    """

    def __init__(self, policy: Policy, narrow: tuple[bool, ...], heads: int, seen: list[int]) -> None:
        self.policy, self.narrow, self.heads, self.seen = policy, narrow, heads, seen
        self.layers = layers = len(narrow)
        self.spared = np.zeros(len(seen), bool)  # [B] batch rows not cut after a recall: their tokens fit the budget
        self.most = np.zeros((layers, len(seen)), np.int64)  # [layers, B] slots that each layer may keep of spared rows
        # int [layers, B] slots that each layer keeps after the last chunk for which `decide` has decided
        self.targets: np.ndarray | None = None
        self.budgets: Any = None  # `targets`, or, for a batch row within its budget, the limit for later tokens
        self.cuts = np.zeros(len(seen), bool)  # [B] batch rows that may lose slots after the last decided chunk
        self.errors = np.zeros((layers, len(seen)))  # [layers, B] sums of the layers' errors over chunks
        self.measurements = np.zeros(len(seen), np.int64)  # [B] number of chunks that `errors` sums over

    def recall(self, every: np.ndarray) -> None:
        """From now on, cut batch rows with more tokens than the budget to `recall_slots`, and spare the other rows, and
        those in which answers attend to `every` slot: bool [B]."""
        if self.policy.recall_slots is not None:
            self.spared = np.array([n <= self.policy.slots(n) for n in self.seen])
            self.most = self.split(None, self.mean_errors())
            self.policy = self.policy.recalling
        self.spared, self.most = self.spared | every, np.where(every, PLENTY, self.most)

    def decide(self, chunk: schedule.Chunk, tokens: np.ndarray, stored: np.ndarray, observed: np.ndarray) -> Decisions:
        """Decide how the layers are cut after a chunk.

        tokens     [B] number of tokens that the chunk adds
        stored     [layers, B] slots before the chunk, over all kv heads of a layer
        observed   bool [B] batch rows with tokens that observe
        """
        policy = self.policy
        if not chunk.last and policy.schedule != "chunk":
            return Decisions(policy, self.layers, None)
        observed = observed & ~self.spared
        alive = stored + self.heads * schedule.read(policy, self.narrow, tokens)
        total = np.array([policy.slots(n) for n in self.seen]) * self.heads * self.layers
        over = (alive.sum(0) > total) & observed
        self.cuts = over if policy.threshold is None else observed
        bar = None if policy.threshold is None else np.where(observed, policy.threshold, -np.inf)
        targets = self.targets = self.split(alive, self.mean_errors())
        free = targets if over.all() else self.split(None, self.mean_errors())
        free = np.where(self.spared, self.most, free)
        self.budgets = np.minimum(np.where(over, targets, free), PLENTY)
        if self.cuts.any() and policy.layers.cascades:
            return Cascade(policy, self.layers, self.heads, lambda asked: self._shared(alive, asked), self.cuts)
        if self.cuts.any() and policy.layers.pools:
            return RankedTogether(policy, self.layers, targets, over, bar)
        most = targets.copy()
        if policy.warmup_layers is not None and not chunk.last:  # TAKE eq. 8
            most[: policy.waiting_layers(self.layers)] = [policy.warmup_slots(n) * self.heads for n in self.seen]
        return Decisions(policy, self.layers, lambda layer, alive: most[layer], observed, bar)

    def split(self, alive: np.ndarray | None, measured: list) -> np.ndarray:
        """Split the budget among the layers by `layer_slots`: int [layers, B] slots over all kv heads. alive: [layers,
        B] slots that the layers hold; None: no limit. measured: `mean_errors`, or preferences of the layers."""
        return layer_slots(self.policy, self.layers, self.heads, self.seen, alive, measured).numpy()

    def _shared(self, alive: np.ndarray, asked: np.ndarray) -> np.ndarray:
        """Split the budget by the preferences [layers, B] of the layers; a layer not read yet has 0."""
        slots = self.split(alive, asked.T.tolist())
        self.budgets = np.where(self.cuts, slots, self.budgets)
        return slots

    def note(self, errors: np.ndarray) -> None:
        """Add the layers' errors in a chunk, fp64 [layers, B]."""
        self.errors += errors * self.cuts
        self.measurements += self.cuts

    def mean_errors(self) -> list:
        """Return for each batch row the list of the layers' mean errors over the chunks so far; None for a batch row
        without measurements."""
        means = (self.errors / self.measurements.clip(1)).T.tolist()
        return [row if n else None for row, n in zip(means, self.measurements, strict=True)]

    def learn(self) -> None:
        """At the prompt's end, let the policy's layer budget learn from the mean errors of all measured batch rows."""
        measured = [row for row in self.mean_errors() if row is not None]
        if measured:
            self.policy.layers.learn(measured)


def check_groups(policy: Policy, cache: EvictionCache, layers: Sequence[EvictionLayer], ranks: Ranks) -> None:
    """Raise ValueError if layers, or heads of a layer, that share a choice under this policy hold different slots,
    because another policy has read the cache."""
    if layers[0].len is None or cache.sequence.policy is policy:
        return
    for group in policy.groups(len(layers)):
        shared = policy.score.shared or any(policy.selection(order).shared for order in group)
        held = [places(layers[order], shared) for order in group if len(group) > 1 or shared]
        every = ranks.objects(held)
        alike = all(None not in each and each == each[:1] * len(each) for each in every)
        if not alike or (shared and any(each != held for each in every)):
            raise ValueError(
                "past_key_values was read under another policy, and layers or heads that are to share their choice "
                "hold different slots; read the prompt again under this policy"
            )


def places(layer: EvictionLayer, shared: bool) -> list[list[list[int]]] | None:
    """Return the positions of a layer's slots, [batch row][head]; None if heads share a choice (`shared`) but hold
    different slots."""
    heads = [[head.tolist() for head in row] for row in layer.positions()]
    return None if shared and any(head != row[0] for row in heads for head in row) else heads


def renew(policy: Policy, cache: EvictionCache, layers: Sequence[EvictionLayer], heads: int, ranks: Ranks) -> None:
    """Before a token is decoded, give the layers new budgets if the cache was last read by another policy or by
    none."""
    sequence = cache.sequence
    if sequence.policy is policy:
        return
    check_groups(policy, cache, layers, ranks)
    slots = layer_slots(policy, len(layers), heads, sequence.seen.tolist())
    least = policy.smallest_budget() * heads
    for layer, budget in zip(layers, slots, strict=True):
        loaded = sequence.policy is None and layer.budget is not None
        if not (loaded or sequence.policy == policy) or layer.budget.min() < least:
            layer.budget = np.minimum(budget.numpy(), PLENTY)
        if not loaded and sequence.policy != policy:
            layer.decode_queries = None  # another policy's rows, or rows that are not of the last tokens
            if policy.carry == "none":
                layer.carry = None
    sequence.policy = policy
