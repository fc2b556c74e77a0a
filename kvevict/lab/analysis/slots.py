"""Simulates the slots of every layer while a prompt is read. The engine's chunks, budgets and decisions run on numbers
of slots instead of tensors, without weights or text.

Three things are assumed. A layer's slots are split evenly over its heads, which does not change their sum. A threshold,
or a selection that may leave a part of the budget unused (chunk, exact=False), uses all of it. All layers measure equal
values, if layer budgets depend on measurements.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...engine.read import schedule
from ...engine.read.budgets import Budgets
from ...engine.read.plan import tsp_of
from ...policy.inputs import Chunk
from ...policy.policy import Policy


@dataclass
class Taken:
    """The numbers of slots around one chunk of a read. Slots are counted per kv head; lists have an entry per
    full-attention layer."""

    chunk: Chunk
    read: list  # rows of the chunk that the layer reads (fewer in layers after `Policy.tsp`)
    stored: list  # slots before the chunk is read
    kept: list  # slots after the chunk is read and cut
    peak: float  # most bytes of slots alive at once, summed over all layers


class Layers:
    """The slots of `count` layers that evict, from chunk to chunk of a prompt. `sizes`, for `Taken.peak`, are the bytes
    of a stored slot and of a new one."""

    def __init__(self, policy: Policy, tokens: int, count: int, kv_heads: int = 1, sizes: tuple = (1, 1)) -> None:
        self.policy, self.tokens, self.count, self.kv_heads, self.sizes = policy, tokens, count, kv_heads, sizes
        self.tsp = tsp_of(policy, True, count)
        self.evicts = schedule.evicts(policy, [tokens])
        self.slots = np.zeros((count, 1), np.int64)  # slots of each layer, summed over its heads
        self.planned = Budgets(policy, schedule.narrow(range(count), self.tsp), kv_heads, [tokens])

    @property
    def cuts(self) -> bool:
        """Whether the prompt's end cuts a layer."""
        return bool(self.planned.cuts.any())

    @property
    def kept(self) -> list:
        """The number of slots per kv head that each layer holds."""
        return self._per_head(self.slots)

    @property
    def budgets(self) -> list:
        """The number of slots per kv head that each layer may hold while decoding."""
        decided = self.planned.budgets
        return self._per_head(self.planned.split(None, [None]) if decided is None else decided)

    def chunks(self) -> Iterator[Taken]:
        tokens = [self.tokens] if self.evicts else ()
        return map(self.take, schedule.chunks(self.policy, self.tokens, tokens))

    def take(self, chunk: Chunk) -> Taken:
        """Simulate the reading of one chunk in all layers."""
        policy, stored = self.policy, self.kept
        read = schedule.read(policy, self.planned.narrow, np.array([chunk.rows]))[:, 0].tolist()
        decisions = self.planned.decide(chunk, np.array([chunk.rows]), self.slots, np.array([True]))
        peak = self._carry_out(decisions, read)
        if chunk.last and self.planned.cuts.any() and policy.rows.needs_full_prompt:
            assert self.planned.targets is not None  # since something was cut
            # All layers hold the chunk while the model drafts over a copy of the cache that is cut to the budgets.
            most = zip(stored, read, self._per_head(self.planned.targets), strict=True)
            copy = sum(min(n + rows, target) + policy.rows.n_d for n, rows, target in most)
            peak = self.sizes[0] * (sum(stored) + copy) + self.sizes[1] * sum(read)
        return Taken(chunk, read, stored, self.kept, peak)

    def _carry_out(self, decisions: Any, read: list) -> float:
        """Cut the slots as `kvevict.engine.read.choosers.Deciding` does, and return the most bytes alive at once."""
        peak, new, sizes = 0, np.zeros_like(self.slots), self.sizes
        for layer, rows in enumerate(read):
            new[layer] = rows * self.kv_heads
            peak = max(peak, int(sizes[0] * self.slots.sum() + sizes[1] * new.sum()))
            if decisions.asks:
                decisions.ask(layer, np.ones(1))
            decision = decisions.at(layer, self.slots[layer] + new[layer])
            for cut in decision.cuts:
                left = self.slots[cut.layer] + new[cut.layer]
                self.slots[cut.layer] = left if cut.slots is None else np.minimum(left, cut.slots)
                new[cut.layer] = 0
        return peak / self.kv_heads

    def _per_head(self, slots: Any) -> list:
        return [n / self.kv_heads if n % self.kv_heads else n // self.kv_heads for n in slots[:, 0].tolist()]
