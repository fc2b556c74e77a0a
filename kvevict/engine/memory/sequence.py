"""The tokens that a cache has read: one object for a conversation, from its first token to its last."""

from __future__ import annotations

import copy
from collections.abc import Sequence as Items
from typing import Any

import numpy as np
import torch

from ...models import compat
from ...ops import _ops
from ...policy.run import Run


class Sequence:
    """What all layers of an `EvictionCache` share: how many tokens they have read, and by which policy.

    Two lengths are never confused: `columns` (and `seen`, without padding) count tokens read, a layer's `len` counts
    slots stored.
    """

    def __init__(self) -> None:
        self.columns = 0  # tokens read, padding included: Transformers' sequence length
        self.seen: np.ndarray | None = None  # int64 [B] tokens read without padding; None before the first ones
        self.floor = 0  # first columns that crop may not remove: slots were evicted after them, or they are padding
        # Columns of the running step, and how many tokens are among them, [B] or one number for all rows
        self.coming: tuple[int, np.ndarray | int] = (0, 0)
        self.archived = 0  # first columns whose slots are in the layers' archives
        # int [B] tokens so far of an answer that attends to the slots of all tokens; -1: other rows; None: all others
        self.since: np.ndarray | None = None
        self.removing: int | None = None  # tokens that a running crop of the cache removes
        self.half_read = False  # a call that changes the cache has not ended
        self.thread: int | None = None  # the thread where the last such call began
        self.packed: tuple[tuple[int, int], ...] = ()  # (start, stop) of columns whose padding was moved to the left
        self.next_position: torch.Tensor | None = None  # [B] int64 positions of the next tokens; None: `seen`
        self.policy: Any = None  # the Policy of the last read; None: a loaded cache (unknown), or no budget
        self.run = Run()  # how the last read was run

    @property
    def removable(self) -> int:
        """How many of the last columns crop may remove."""
        return max(0, self.columns - self.floor)

    @property
    def awaits(self) -> bool:
        """Whether some row's answer attends to the slots of all tokens and has not chosen among them yet."""
        return self.since is not None

    def choosing(self) -> tuple[list[int], list[int]]:
        """(rows whose slots are chosen after their answer's next token, by `Policy.recall_after`; the other rows)."""
        if self.since is None:
            return [], []
        due = self.since == self.policy.answered - 1
        return np.flatnonzero(due).tolist(), np.flatnonzero(~due).tolist()

    def fix(self) -> None:
        """Let crop remove nothing of what was read up to here, the running step's columns included."""
        self.floor = self.columns + self.coming[0]

    def advance(self) -> None:
        """End the running step: its columns count as read."""
        (columns, tokens), self.coming = self.coming, (0, 0)
        self.columns += columns
        least = int(np.min(tokens))
        if least < columns:  # crop may not remove padding
            self.floor = max(self.floor, self.columns - least)
        assert self.seen is not None
        self.seen = self.seen + tokens

    def count_to_remove(self, tokens_to_remove: int) -> int:
        """How many tokens `EvictionCache.crop` removes. Raises ValueError if it may not remove as many."""
        if tokens_to_remove > 0:
            if not compat.CROP_TAKES_LENGTH:
                raise ValueError(
                    f"crop({tokens_to_remove}): give a negative number, minus the number of tokens to remove"
                )
            tokens_to_remove = min(0, tokens_to_remove - self.columns)
        count = -tokens_to_remove if self.seen is not None else 0
        if count > self.removable:
            raise ValueError(
                f"crop cannot remove {count} tokens: only the last {self.removable} were read since slots were "
                "evicted; read the prompt again instead, or fork the cache before a turn"
            )
        if count and self.policy is not None and self.policy.carry == "sum":
            raise ValueError(
                "crop cannot remove tokens whose attention is added up in other slots (h2o, vatp): fork the cache "
                "before them"
            )
        return count

    def crop(self, count: int) -> None:
        assert self.seen is not None
        self.columns -= count
        self.archived = min(self.archived, self.columns)
        self.seen = np.maximum(self.seen - count, 0)
        if self.since is not None:
            self.since = np.where(self.since < 0, -1, self.since - count)
        if self.next_position is not None:
            self.next_position = self.next_position - count

    def select(self, rows: list[int]) -> None:
        """Keep these batch rows, in any order; a row may be named twice."""
        assert self.seen is not None
        self.seen = self.seen[rows]
        if self.since is not None:
            since = self.since[rows]
            self.since = None if (since < 0).all() else since
        if self.next_position is not None:
            self.next_position = self.next_position[rows]

    def trim(self) -> None:
        """Remove columns that are padding in all rows."""
        assert self.seen is not None
        longest = int(self.seen.max())
        gone = max(0, self.columns - longest)
        self.columns, self.floor, self.archived = self.columns - gone, self.floor - gone, self.archived - gone
        if (self.seen == longest).all():
            self.next_position = None

    def positions(self, device: torch.device) -> torch.Tensor:
        """[B] int64 positions of the rows' next tokens."""
        if self.next_position is not None:
            return self.next_position
        return _ops.upload(self.seen, device)

    @classmethod
    def joined(cls, each: Items[Sequence], device: torch.device) -> Sequence:
        """Concatenate batch rows. A row with fewer columns counts as padded at its left."""
        whole = copy.copy(each[0])
        whole.columns = whole.archived = max(one.columns for one in each)
        whole.floor = whole.columns - min(one.removable for one in each)
        whole.seen = np.concatenate([one.seen for one in each])
        if any(one.awaits for one in each):
            sinces = [np.full_like(one.seen, -1) if one.since is None else one.since for one in each]
            whole.since = np.concatenate(sinces)
        whole.next_position = torch.cat([one.positions(device) for one in each])
        whole.packed = ()
        return whole
