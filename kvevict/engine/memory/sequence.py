"""The tokens that a cache has read: one object for a conversation, from its first token to its last."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence as Items
from typing import Any

import numpy as np
import torch

from ...models import compat
from ...ops import _ops
from ...policy.run import Run


class Sequence:
    """The counts of tokens read, and the policy, which all layers of an `EvictionCache` share.

    `columns` and, without padding, `seen` count tokens read; a layer's `len` counts slots stored, which are fewer after
    an eviction.
    """

    def __init__(self) -> None:
        self.columns = 0  # tokens read, padding included: Transformers' sequence length
        self.seen: np.ndarray | None = None  # int64 [B] tokens read without padding; None before the first token
        # Number of first columns that `crop` may not remove: slots were evicted since, or the columns are padding
        self.floor = 0
        # (columns of the running step; number of tokens, without padding, among them: [B], or one for all batch rows)
        self.coming: tuple[int, np.ndarray | int] = (0, 0)
        self.removing: int | None = None  # number of tokens that a running `EvictionCache.crop` removes
        # Id of the thread whose call changes the cache, and after an error has left the cache half read; 0: none
        self.half_read = 0
        self.packed: tuple[tuple[int, int], ...] = ()  # (start, stop) of columns whose padding was moved to the left
        self.next_position: torch.Tensor | None = None  # int64 [B] position of the next token; None: equal to `seen`
        self.policy: Any = None  # the Policy of the last read; None: unknown (a loaded cache), or no read yet
        self.run = Run()  # the Run of the last read

    @property
    def removable(self) -> int:
        """The number of last columns that `crop` may remove."""
        return max(0, self.columns - self.floor)

    def begin(self) -> None:
        """Mark the cache as half read: a call changes it from now on, until `settle`."""
        self.half_read = threading.get_ident()

    def settle(self) -> None:
        """End the call that changes the cache."""
        self.half_read = 0

    def fix(self) -> None:
        """Forbid `crop` to remove any column read so far, the running step's columns included."""
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
        """Return the number of tokens that `EvictionCache.crop` removes. Raises ValueError if it may not remove this
        many."""
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
        self.seen = np.maximum(self.seen - count, 0)
        if self.next_position is not None:
            self.next_position = self.next_position - count

    def select(self, rows: list[int]) -> None:
        """Keep the batch rows `rows`, in this order; a batch row may occur twice."""
        assert self.seen is not None
        self.seen = self.seen[rows]
        if self.next_position is not None:
            self.next_position = self.next_position[rows]

    def trim(self) -> int:
        """Remove the columns that are padding in all batch rows. Returns their number."""
        assert self.seen is not None
        longest = int(self.seen.max())
        gone = max(0, self.columns - longest)
        self.columns, self.floor = self.columns - gone, self.floor - gone
        if (self.seen == longest).all():
            self.next_position = None
        return gone

    def positions(self, device: torch.device) -> torch.Tensor:
        """Return the position of each batch row's next token: int64 [B]."""
        if self.next_position is not None:
            return self.next_position
        return _ops.upload(self.seen, device)

    @classmethod
    def joined(cls, each: Items[Sequence], device: torch.device) -> Sequence:
        """Concatenate the batch rows of several sequences. A row with fewer columns than the longest counts as padded
        at its left."""
        whole = copy.copy(each[0])
        whole.columns = max(one.columns for one in each)
        whole.floor = whole.columns - min(one.removable for one in each)
        whole.seen = np.concatenate([one.seen for one in each])
        whole.next_position = torch.cat([one.positions(device) for one in each])
        whole.packed = ()
        return whole
