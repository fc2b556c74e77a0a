"""The chunks in which a prompt is read. The engine reads these chunks, and `kvevict plan` computes their cost. This
module does not import torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ...policy.inputs import Chunk

if TYPE_CHECKING:
    from ...policy.policy import Policy


def evicts(policy: Policy, seen: list[int]) -> bool:
    """True if reading a prompt drops slots, drops tokens at the tsp layer, or needs the scores of every chunk. seen:
    number of tokens read in each batch row, this prompt included."""
    if policy.carry != "none" or policy.threshold is not None or any(n > policy.slots(n) for n in seen):
        return True
    chunks = [min(n, policy.chunk_size or n) for n in seen]
    return policy.tsp is not None and any(policy.propagated(n) < n for n in chunks)


def chunks(policy: Policy, columns: int, tokens: Iterable[int] = (), observers: Any = None) -> Iterator[Chunk]:
    """Yield the chunks of a prompt of `columns` columns. The first chunk is the remainder, so that all others are full.
    Then come chunks without new columns that repeat parts of the prompt, if the policy's rows repeat it.

    tokens      number of tokens in each batch row; (), if the read evicts nothing: then no rows are appended
    observers   the `Rows` that append rows to the chunks; None: those of the policy
    """
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
    """Return the ranges of tokens to read again after a prompt of `tokens` tokens: one range of all tokens, or several
    if a slot's score is the largest of its scores by the single ranges."""
    if not policy.rows.repeats or policy.schedule == "chunk":
        return []
    part = policy.rows.part if policy.score.largest else max(tokens, 1)
    return [range(start, min(start + part, tokens)) for start in range(0, tokens, part)]


def narrow(order: Iterable[int], tsp: int | None) -> tuple[bool, ...]:
    """Return for each evicting decoder layer in `order` whether it comes after layer `tsp`, and so reads only a chunk's
    best tokens."""
    return tuple(tsp is not None and layer > tsp for layer in order)


def read(policy: Policy, narrow: tuple[bool, ...], tokens: np.ndarray) -> np.ndarray:
    """Return the number of tokens that each evicting layer reads of a chunk with tokens [B]: int [layers, B]."""
    return np.where(np.array(narrow)[:, None], policy.propagated(tokens), tokens)


def waits(policy: Policy, order: int, layers: int) -> bool:
    """True if the evicting layer number `order` of `layers` keeps the slots that a later layer chooses."""
    return order < policy.waiting_layers(layers) - 1


def follows(policy: Policy, order: int) -> bool:
    """True if the evicting layer number `order` keeps the slots that an earlier layer chose."""
    return order % policy.n_reuse > 0


def observes(policy: Policy, order: int, layers: int) -> bool:
    """True if the evicting layer number `order` of `layers` needs scores, because it chooses slots or because its slots
    carry scores."""
    return not follows(policy, order) and (policy.carry != "none" or not waits(policy, order, layers))


def overfull(policy: Any, slots: Any, budget: Any, heads: int = 1) -> Any:
    """Whether decoding has to cut a layer to its budget. slots: slot counts of layers; budget: their budgets. Both are
    numbers or arrays, over all `heads` kv heads of a layer."""
    return slots > budget + (policy.interval - 1) * heads if policy.decode else slots < 0
