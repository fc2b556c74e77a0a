"""How many slots every layer holds while a prompt is read, and what observes them: the reader's own chunks, with counts
in place of tensors. No weights, no text.

How a layer's slots are split over its heads does not change their sum, so a head stands for the layer's average. A
selection that leaves some of the budget unused (chunk, exact=False) counts as if it used it, and layers that share by
what a prompt measures as if all measured the same.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from ..engine import propagate, schedule
from ..engine.schedule import Chunk
from ..policy.layers import layer_slots


@dataclass
class Taken:
    """One chunk of a read. Slots are per kv head; lists have an entry per full-attention layer."""

    chunk: Chunk
    read: list  # the chunk's rows that get to the layer
    stored: list  # slots before
    kept: list  # slots after
    scored: list  # whether the layer chooses for itself here
    parts: list  # the `kvevict.policy.rows.Part`s whose attention is computed for its scores
    peak: int  # most slots alive at once, summed over layers
    draft: list = field(default_factory=list)  # slots of the copy over which the model drafts, if it does


class Layers:
    """The slots of `count` layers that evict, from chunk to chunk of a prompt."""

    def __init__(self, policy, tokens: int, count: int, kv_heads: int = 1):
        self.policy, self.tokens, self.count, self.kv_heads = policy, tokens, count, kv_heads
        self.tsp = propagate.layer_of(policy, True, count)
        self.evicts = schedule.evicts(policy, [tokens])
        self.along = policy.rows.along(tokens) if self.evicts else 0
        self.kept, self.budgets = [0] * count, []

    def chunks(self) -> Iterator[Taken]:
        limits = schedule.limits(self.policy, range(self.count), self.tsp)
        return map(self.take, schedule.chunks(self.policy, self.tokens, limits, self.along))

    def take(self, chunk: Chunk) -> Taken:
        """What a chunk does to the layers."""
        policy, stored = self.policy, list(self.kept)
        read = [min(chunk.rows, most) for most in chunk.limits]
        alive = [n + rows for n, rows in zip(stored, read, strict=True)]
        self.budgets = targets = self.split(alive)
        cuts = chunk.evicts and sum(targets) < sum(alive)
        draft = [min(n, most) for n, most in zip(alive, targets, strict=True)] if self.drafts(chunk, cuts) else []
        if cuts and policy.layers.cascades:
            scored, peak = [True] * self.count, self.cascade(alive, stored)
        else:
            scored, peak = self.group(chunk, read, targets, cuts)
        if draft:  # until then the whole chunk waits in every layer
            peak = sum(alive) + sum(draft) + self.count * policy.rows.n_d
        if not cuts:
            self.budgets = self.split(None)
        parts = [
            policy.rows.parts(rows, n, chunk.along, self.tokens) if self.observed(layer, scored[layer]) else []
            for layer, (rows, n) in enumerate(zip(read, stored, strict=True))
        ]
        return Taken(chunk, read, stored, list(self.kept), scored, parts, peak, draft)

    def drafts(self, chunk, cuts) -> bool:
        return chunk.last and cuts and self.policy.rows.whole

    def observed(self, layer, scored) -> bool:
        """Sums that are carried take in every chunk, whether or not slots are evicted now."""
        return not schedule.follows(self.policy, layer) if self.policy.score.carries else scored

    def group(self, chunk, read, targets, cuts) -> tuple:
        """(whether each layer scores, most slots at once) where `kvevict.engine.choosers.Group` chooses."""
        policy, kept, relaxed = self.policy, self.kept, self.policy.warmup_slots(self.tokens)
        scored, held, alive, peak = [], [], sum(kept), 0
        for layer, rows in enumerate(read):
            peak = max(peak, alive + (len(held) + 1) * rows)
            slots = n = kept[layer] + rows
            if chunk.evicts:
                slots = min(n, relaxed if schedule.relaxed(policy, layer, self.count, chunk) else targets[layer])
            held.append(layer)
            waits = schedule.waits(policy, layer, self.count) and slots < n
            propagates = layer == self.tsp and read[-1] < rows
            chooses = slots < n or propagates or (cuts and policy.layers.measures)
            scored.append(chooses and not waits and not schedule.follows(policy, layer))
            if waits:
                continue
            for other in held:
                left = min(slots, kept[other] + read[other])
                alive, kept[other] = alive + left - kept[other], left
            held = []
        return scored, peak

    def cascade(self, alive, stored) -> int:
        """Most slots at once where `kvevict.engine.cascade.Cascade` chooses; cuts but the last leave one more."""
        peak = 0
        for layer, n in enumerate(alive):
            peak = max(peak, sum(self.kept) + n - stored[layer])
            shares = self.split(alive, [float(other <= layer) for other in range(self.count)])
            spare = int(layer < self.count - 1)
            self.kept[: layer + 1] = [min(share + spare, n) for share, n in zip(shares[: layer + 1], alive)]
        return peak

    def split(self, alive, measured=None) -> list:
        """`layer_slots` per kv head, of layers that have `alive` slots per head; None: as many as they like."""
        if alive is not None:
            alive = (torch.tensor(alive, dtype=torch.double, device="cpu")[:, None] * self.kv_heads).round()
        slots = layer_slots(self.policy, self.count, self.kv_heads, [self.tokens], alive, [measured])[:, 0].tolist()
        return [n / self.kv_heads if n % self.kv_heads else n // self.kv_heads for n in slots]
