"""Decodes sequences together: in a step the model reads one token of each. Sequences join and leave between steps."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..context import context
from ..engine.memory.joining import Pools, join, part
from ..models import rotary
from ..models.compat import CACHE
from ..models.families import base_model, device_of, find_decoder

__all__ = ["Batch", "Pools"]


class Batch:
    """The sequences that a patched model decodes together. `rows` has an object for each sequence, in the order of the
    logits.

    A row may be any object by which the caller knows the sequence. Caches that come from one `Pools` join and leave
    without a copy; others are copied once, when they join. A row's slots, budgets and evictions equal those of the
    sequence alone; logits are equal up to rounding.
    """

    def __init__(self, model: torch.nn.Module, rows: Iterable[Any] = (), cache: Any = None) -> None:
        """Start with `rows`, one for each batch row of `cache`."""
        self.model, self.rows, self.cache = base_model(model), list(rows), cache
        self.device = device_of(self.model)
        self.unseen: Any = None  # the next tokens (`kvevict.answering.writing.Unseen`), if the host has not read them

    def add(self, row: Any, cache: Any) -> None:
        """Add a sequence, which decodes from the next step on. The batch takes over `cache`, which holds the sequence's
        tokens so far. Raises ValueError for a cache that cannot share a step with the batch's."""
        decoder = find_decoder(self.model)
        if self.rows and (rotary.axes(decoder) or rotary.rope_depends_on_length(decoder)):
            raise ValueError("positions of this model depend on the whole batch: decode one sequence at a time")
        self.cache = join([self.cache, cache]) if self.rows else cache
        self.rows.append(row)

    def remove(self, row: Any) -> Any:
        """Remove a sequence, and return its cache, which can go on alone or in another batch."""
        cache = self._part([row])
        self.keep([other for other in self.rows if other != row])
        return cache

    def keep(self, rows: Sequence[Any]) -> None:
        """Drop all sequences of the batch except `rows`."""
        self.cache, self.rows = self._part(rows) if rows else None, list(rows)

    def _part(self, rows: Sequence[Any]) -> Any:
        if len(rows) == len(self.rows):
            return self.cache
        if (ahead := context().ahead) is not None:
            ahead.close()  # so that the cache holds no tokens that were read ahead
        return part(self.cache, [self.rows.index(row) for row in rows])

    @torch.no_grad()
    def step(self, tokens: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """Read the next token of each row, and return the logits [B, vocabulary] after it. `tokens` is a list of ids,
        or a tensor [B] of ids on the model's device."""
        if len(tokens) != len(self.rows):
            raise ValueError(f"tokens has {len(tokens)} ids, expected {len(self.rows)}: one for each row")
        ids = torch.as_tensor(tokens, device=self.device)[:, None]
        tiers = getattr(self.cache, "tiers", None)
        due, others = ([], []) if tiers is None else tiers.choosing()
        if not due or not others:
            return self._logits(self.cache, ids)
        parts = [(part(self.cache, rows), ids[rows]) for rows in (due, others)]
        logits = torch.cat([self._logits(*each) for each in parts])
        order = torch.tensor([*due, *others]).argsort()
        self.cache = part(join([cache for cache, _ in parts]), order.tolist())
        return logits[order.to(self.device)]

    def _logits(self, cache: object, ids: torch.Tensor) -> torch.Tensor:
        """Read ids [B, 1] into a cache, and return the logits [B, vocabulary] after them."""
        sequence = getattr(cache, "sequence", None)
        following = None if sequence is None else sequence.next_position
        place = {} if following is None else dict(position_ids=following[:, None])
        out = self.model(ids, **{CACHE: cache}, **place, use_cache=True, return_dict=True)
        return out.logits[:, -1]
