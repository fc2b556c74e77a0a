"""What is known of an answer whose first tokens attend to the slots of all tokens (`Policy.recall_after`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...policy.seen.slots import Bounds
from .rows import together
from .storage import Storage

OF_ROWS = {"q": 2, "out": 1, "lse": 2}  # field of `Awaited` -> its dimension over query rows
Rows = Mapping[str, Tensor]  # the query row of a token in one layer: the fields `OF_ROWS` of all batch rows


@dataclass(frozen=True)
class Awaited:
    """The slots that a layer kept at a prompt's end, and the query rows by which it chooses again after the answer's
    first tokens. B batch rows."""

    slots: np.ndarray  # [B] number of slots kept at the prompt's end, summed over the kv heads of all ranks
    protected: tuple[Tensor, Tensor]  # int32 [B] each: number of the prompt's first and of its last slots that stay
    bounds: Bounds
    skip: Tensor  # int32 [B] number of first query rows that are padding
    q: Tensor  # [B, H, R, D] R query rows, of the prompt's last tokens
    out: Tensor | None  # [B, R, H, D] attention outputs of the R query rows; None: no quantity needs them
    lse: Tensor | None  # [B, H, R] log-sum-exp of the rows' logits over all slots; None: rows attend to kept slots only
    kept: Storage | None = None  # the kept slots, put aside; None: the layer attends to them
    head_offsets: np.ndarray | None = None  # the layer's `head_offsets` for the slots put aside

    @classmethod
    def joined(cls, each: Sequence[Awaited]) -> Awaited:
        """Concatenate batch rows, without the slots put aside. Rows with fewer query rows than others get padding in
        front, which `skip` excludes."""
        most = max(one.q.shape[2] for one in each)
        each = [one._padded(most - one.q.shape[2]) for one in each]
        own = {name: together([getattr(one, name) for one in each]) for name in ("slots", "skip", *OF_ROWS)}
        first, last = (torch.cat(ends) for ends in zip(*(one.protected for one in each), strict=True))
        bounds = Bounds(*(together([*parts]) for parts in zip(*(one.bounds for one in each), strict=True)))
        return cls(protected=(first, last), bounds=bounds, **own)

    def _padded(self, gap: int) -> Awaited:
        held = {name: x for name in OF_ROWS if (x := getattr(self, name)) is not None}
        front = {name: (0, 0) * (x.ndim - 1 - OF_ROWS[name]) + (gap, 0) for name, x in held.items()}
        rows: Any = {name: torch.nn.functional.pad(x, front[name]) for name, x in held.items()}
        return replace(self, skip=self.skip + gap, **rows)

    def row(self, at: int) -> Awaited:
        """Return batch row `at`, with the same slots and its own counts of them, since a `Table` may change the kept
        slots' counts."""
        own = slice(at, at + 1)
        held = {name: getattr(self, name) for name in ("slots", "skip", "head_offsets", *OF_ROWS)}
        rows: dict = {name: None if x is None else x[own] for name, x in held.items()}
        first, last = self.protected
        bounds = Bounds(*(None if x is None else x[own] for x in self.bounds))
        kept = None if self.kept is None else self.kept.aliased([at])
        return replace(self, protected=(first[own], last[own]), bounds=bounds, kept=kept, **rows)

    def tensors(self) -> tuple:
        own = () if self.kept is None else self.kept.tensors()
        return *own, *self.protected, *self.bounds, self.skip, self.q, self.out, self.lse


@dataclass(frozen=True)
class Answering:
    """The phase of a batch row whose answer attends to the slots of all tokens, and has not chosen among them yet."""

    asked: Mapping[int, Awaited]  # layer -> what it kept at the prompt's end, in this batch row
    # For each token of the answer: ({layer: the token's query row}, the answer's batch row in these)
    tokens: tuple[tuple[Mapping[int, Rows], int], ...] = ()

    def followed(self, rows: Mapping[int, Rows], row: int) -> Answering:
        """Append a token of the answer, whose query rows are batch row `row` of `rows`."""
        return replace(self, tokens=(*self.tokens, (rows, row)))

    def crop(self, count: int) -> Answering:
        """Remove the answer's last `count` tokens."""
        return replace(self, tokens=self.tokens[: len(self.tokens) - count])

    def at(self, index: int) -> Awaited:
        """Return what layer `index` kept, with the query rows of the answer's tokens after those of the prompt."""
        rows: Any = {
            name: torch.cat([x, *(each[index][name][b : b + 1] for each, b in self.tokens)], dim)
            for name, dim in OF_ROWS.items()
            if (x := getattr(self.asked[index], name)) is not None
        }
        return replace(self.asked[index], **rows)

    def joins(self, other: Answering) -> bool:
        """Whether this answer and `other` can choose in one batch: both have put their kept slots aside, and both know
        the same of them."""
        pairs = [(self.asked[index], other.asked[index]) for index in self.asked]
        return all(_known(one) == _known(its) and None not in (one.kept, its.kept) for one, its in pairs)

    def tensors(self) -> tuple:
        rows = [x for each, _ in self.tokens for row in each.values() for x in row.values()]
        return *(x for each in self.asked.values() for x in each.tensors()), *rows


def _known(asked: Awaited) -> list[bool]:
    return [x is not None for x in (asked.head_offsets, *asked.bounds, asked.out)]
