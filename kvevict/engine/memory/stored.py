"""A layer's slots where they lie: ragged, in flat buffers. What is read of them; storage.py changes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ...ops import _ops
from ...ops._ops import Held
from ...policy import kv

S = TypeVar("S", bound="Stored")


@dataclass
class Stored(Held):
    """The slots of a layer; batch rows and kv heads may hold different numbers. A head's rows are in ascending
    position. A fork's slots begin with a `prefix`; the other fields are of the slots after it."""

    counts: np.ndarray = None  # type: ignore[assignment]  # len on the host
    starts: np.ndarray = None  # type: ignore[assignment]  # `offset` on the host
    regions: tuple = ()  # the `Region` (`Lent`) of each batch row; none outside a pool
    centred: Any = None  # bool [B] rows with a centre, if keys are packed
    like: Tensor = None  # type: ignore[assignment]  # [0, D] of the dtype of new keys and values
    prefix: Any = None  # the `Storage` of the slots before these; one in the host's memory may have a prefix itself
    on_host: bool = False  # in the host's memory, for a layer on another device; pinned there if that is a GPU

    is_centred = property(lambda self: self.centre is None or bool(self.centred.all()))
    buffers = property(lambda self: (self.k, self.v, self.pos))  # a row per slot
    device = property(lambda self: self.k.device)
    dim = property(lambda self: self.like.shape[1])
    kinds = property(lambda self: (self.k_kind, self.v_kind))
    far = property(lambda self: self.prefix is not None and self.prefix.on_host and not self.on_host)

    @property
    def total_counts(self) -> np.ndarray:
        """[B, Hkv] on the host: the prefix's slots too."""
        return self.counts if self.prefix is None else self.prefix.total_counts + self.counts

    @property
    def total_len(self) -> Tensor:
        """`total_counts`, int32 on the device."""
        if self.far:
            return _ops.upload(self.total_counts, self.device, torch.int32)
        return self.len if self.prefix is None else self.prefix.total_len + self.len

    def longest(self) -> int:
        """Slots of the fullest head."""
        return int(self.total_counts.max()) if self.counts.size else 0

    def slot_bytes(self) -> int:
        """Bytes of a slot's key and value, with their scales."""
        return sum(x.element_size() * x.shape[1] for x in (self.k, self.v))

    def live_bytes(self) -> int:
        """Bytes of the stored keys and values: `slot_bytes` * sum(len)."""
        return 0 if self.k is None else self.slot_bytes() * int(self.total_counts.sum())

    def padded_bytes(self) -> int:
        """`live_bytes` if every head were padded to the fullest."""
        return self.slot_bytes() * self.counts.size * self.longest()

    def segments(self) -> Iterator[tuple[int, int, slice]]:
        """(b, h, slice of the flat buffers) of every head's slots, without a prefix's."""
        lens = self.counts.tolist()
        for b, row in enumerate(self.starts.tolist()):
            for h, start in enumerate(row):
                yield b, h, slice(start, start + lens[b][h])

    def places(self, b: int, h: int) -> list[tuple[Stored, slice]]:
        """Where the slots of a head lie, in order: storages, and slices of their flat buffers."""
        before = [] if self.prefix is None else self.prefix.places(b, h)
        start = int(self.starts[b, h])
        return [*before, (self, slice(start, start + int(self.counts[b, h])))]

    def positions(self) -> list[list[Tensor]]:
        """Positions of the slots by row and head: int32 copies, of a far storage in the host's memory."""
        device = self.prefix.device if self.far else self.device
        rows, heads = map(range, self.counts.shape)
        each = [[[one.pos[at].to(device) for one, at in self.places(b, h)] for h in heads] for b in rows]
        return [[torch.cat(parts) for parts in row] for row in each]

    def numbers(self, name: str, b: int, h: int, rows: slice) -> Tensor:
        """The numbers [n, D] of rows of "k" or "v" that belong to head (b, h); fp32 if they are packed."""
        centre = self.centre[b, h] if name == "k" and self.centre is not None else None
        return kv.numbers(getattr(self, name)[rows], getattr(self, f"{name}_kind"), self.dim, centre)

    def held(self, length: Tensor) -> Held:
        """The first length [B, Hkv] slots of each head, as an op reads or writes them."""
        return Held(self.k, self.v, self.pos, self.offset, length, self.centre, self.k_kind, self.v_kind)

    def gathered(self) -> Any:
        """All slots in one place, for reading."""
        return self

    def dense(self, name: str) -> Any:
        """Copy [B, Hkv, longest, D] of "k" or "v", zeros after shorter heads; None before the first tokens."""
        if self.k is None:
            return None
        whole, dense = self.gathered(), self.like.new_zeros(*self.len.shape, self.longest(), self.dim)
        for b, h, rows in whole.segments():
            dense[b, h, : rows.stop - rows.start] = whole.numbers(name, b, h, rows)
        return dense

    def tensors(self) -> tuple:
        """All tensors that take up memory, the prefix's too; of a pool as many rows as are lent."""
        if self.k is None:
            return ()
        prefix = () if self.prefix is None else self.prefix.tensors()
        lent = sum(region.rows for region in set(self.regions)) if self.regions else None
        centre = () if self.centre is None else (self.centre,)
        return *prefix, *(t[:lent] for t in self.buffers), self.offset, self.len, *centre

    def last(self: S, count: int | np.ndarray) -> S:
        """View the last `count` slots of each head, [B] or a number, for reading alone."""
        counts = np.zeros_like(self.counts) + np.reshape(count, (-1, 1))
        if self.prefix is not None and (self.counts < counts).any():
            return self.gathered().last(count)
        length = _ops.upload(counts, self.device, torch.int32)
        at, starts = self.offset + self.len - length, self.starts + self.counts - counts
        return replace(self, offset=at, len=length, counts=counts, starts=starts, prefix=None)

    def centred_at(self: S, centre: Tensor, known: np.ndarray) -> S:
        """Give batch rows that have no centre for their keys the one in centre fp32 [B, Hkv, D]. known: bool [B] on the
        host, the rows that `centre` has one for."""
        old = _ops.upload(self.centred, self.device, torch.bool)[:, None, None]
        both = torch.where(old, self.centre, centre)  # type: ignore[arg-type]  # packed keys have one
        return self._around(both, self.centred | known)

    def centred_as(self: S, other: Stored) -> S:
        """A storage with another one's centres: it may have some of rows that have no slot here."""
        if self.centre is None or other.centre is None:
            return self
        if self.on_host != other.on_host and (self.centred == other.centred).all():
            return self  # known here: no wait for the device
        return self._around(other.centre.to(self.device), other.centred)

    def _around(self: S, centre: Tensor | None, centred: np.ndarray) -> S:
        prefix = self.prefix if self.prefix is None or self.far else self.prefix._around(centre, centred)
        return replace(self, centre=centre, centred=centred, prefix=prefix)


class Later:
    """Slots that are read again later: the attributes are those of what `read` then returns, but the `known` ones."""

    def __init__(self, read: Callable[[], object], **known: object) -> None:
        self._read = read
        self.__dict__.update(known)

    def __getattr__(self, name: str) -> object:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._read(), name)
