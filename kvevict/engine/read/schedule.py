"""The chunks that a prompt is read in: `Spans` reads them, and `kvevict plan` prices them. Free of torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ...policy.inputs import Chunk

if TYPE_CHECKING:
    from ...policy.policy import Policy


def evicts(policy: Policy, seen: list[int]) -> bool:
    """True if this read drops slots, drops tokens at the tsp layer, or uses scores that need every row from the start.
    seen: token count of each batch row after the read."""
    if policy.carry != "none" or policy.threshold is not None or any(n > policy.slots(n) for n in seen):
        return True
    chunks = [min(n, policy.chunk_size or n) for n in seen]
    return policy.tsp is not None and any(policy.propagated(n) < n for n in chunks)


def chunks(policy: Policy, columns: int, tokens: Iterable[int] = (), observers: Any = None) -> Iterator[Chunk]:
    """The chunks of a prompt of `columns` columns, the remainder first, so that the last chunk is full; then chunks
    without columns that repeat its parts. tokens: token count of each batch row, given if the read `evicts`;
    `observers` (None: the policy's rows) are then appended to the chunks."""
    observers = observers or policy.rows
    size, parts = policy.chunk_size or columns, repeated(policy, max(tokens, default=0))
    for end in range((columns - 1) % size + 1, columns + 1, size):
        start, last = max(0, end - size), end == columns and not parts
        rows = 0 if parts else max((observers.appended(n, end - start, last) for n in tokens), default=0)
        yield Chunk(start, end, last, rows, not parts)
    for again in parts:
        last, rows = again is parts[-1], max(policy.rows.appended(n, len(again), False) for n in tokens)
        yield Chunk(columns, columns, last, rows, again=again)


def repeated(policy: Policy, tokens: int) -> list[range]:
    """Token ranges to read a second time after a prompt of `tokens` tokens. Only scores merged by maximum can be split
    into several ranges; others get one."""
    if not policy.rows.repeats or policy.schedule == "chunk":
        return []
    part = policy.rows.part if policy.score.largest else max(tokens, 1)
    return [range(start, min(start + part, tokens)) for start in range(0, tokens, part)]


def narrow(order: Iterable[int], tsp: int | None) -> tuple[bool, ...]:
    """Per evicting layer, True if it reads only a chunk's best tokens; order: the decoder layers that evict."""
    return tuple(tsp is not None and layer > tsp for layer in order)


def read(policy: Policy, narrow: tuple[bool, ...], tokens: np.ndarray) -> np.ndarray:
    """Number of a chunk's tokens [B] that each evicting layer reads, int [layers, B]."""
    return np.where(np.array(narrow)[:, None], policy.propagated(tokens), tokens)


def waits(policy: Policy, order: int, layers: int) -> bool:
    """True if an evicting layer takes the slots that a later layer chooses."""
    return order < policy.waiting_layers(layers) - 1


def follows(policy: Policy, order: int) -> bool:
    """True if an evicting layer takes the slots that an earlier layer chose."""
    return order % policy.n_reuse > 0


def observes(policy: Policy, order: int, layers: int) -> bool:
    """True if an evicting layer's rows observe: the layer chooses slots, or its slots carry scores."""
    return not follows(policy, order) and (policy.carry != "none" or not waits(policy, order, layers))


def overfull(policy: Any, slots: Any, budget: Any, heads: int = 1) -> Any:
    """True if decoding cuts a layer back to its budget. slots, budget: sums over its heads, numbers or arrays."""
    return slots > budget + (policy.interval - 1) * heads if policy.decode else slots < 0
