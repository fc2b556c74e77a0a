"""The slots of a layer in flat, ragged buffers, as they are read. storage.py changes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from ...ops import _ops
from ...ops._ops import Held
from ...policy import kv

S = TypeVar("S", bound="Stored")


@dataclass
class Stored(Held):
    """The slots of a layer. Heads and batch rows may hold different numbers of slots; a head's are in ascending
    position. A fork's slots begin with a `prefix`; the other fields describe only the slots after it."""

    counts: np.ndarray = None  # type: ignore[assignment]  # `len` on the host
    starts: np.ndarray = None  # type: ignore[assignment]  # `offset` on the host
    regions: tuple = ()  # the `Region` or `Lent` of each batch row; empty for buffers that nothing has lent
    centred: np.ndarray = None  # type: ignore[assignment]  # bool [B] rows whose `centre` is set, if keys are packed
    like: Tensor = None  # type: ignore[assignment]  # [0, D] of the dtype of new keys and values
    prefix: Stored | None = None  # the slots before these; a prefix in the host's memory may have one itself
    on_host: bool = False  # buffers in the host's memory, for a layer on another device; pinned if that is a GPU

    is_centred = property(lambda self: self.centre is None or bool(self.centred.all()))
    buffers = property(lambda self: (self.k, self.v, self.pos))  # a row per slot
    device = property(lambda self: self.k.device)
    dim = property(lambda self: self.like.shape[1])
    kinds = property(lambda self: (self.k_kind, self.v_kind))
    far = property(lambda self: self.prefix is not None and self.prefix.on_host and not self.on_host)

    @property
    def total_counts(self) -> np.ndarray:
        """[B, Hkv] slots on the host, with the prefix's."""
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
        """Bytes of all stored keys and values."""
        return 0 if self.k is None else self.slot_bytes() * int(self.total_counts.sum())

    def padded_bytes(self) -> int:
        """`live_bytes` if every head were padded to the fullest."""
        return self.slot_bytes() * self.counts.size * self.longest()

    def segments(self) -> Iterator[tuple[int, int, slice]]:
        """Yield (b, h, rows of the flat buffers) for every head, without the prefix's slots."""
        for b, (starts, counts) in enumerate(zip(self.starts.tolist(), self.counts.tolist(), strict=True)):
            for h, (start, count) in enumerate(zip(starts, counts, strict=True)):
                yield b, h, slice(start, start + count)

    def places(self, b: int, h: int) -> list[tuple[Stored, slice]]:
        """Where the slots of a head lie, in order: storages, and rows of their flat buffers."""
        before = [] if self.prefix is None else self.prefix.places(b, h)
        start = int(self.starts[b, h])
        return [*before, (self, slice(start, start + int(self.counts[b, h])))]

    def positions(self) -> list[list[Tensor]]:
        """Copy the positions of the slots, int32 [row][head]; those of a far storage into the host's memory."""
        device = self.prefix.device if self.prefix is not None and self.far else self.device
        rows, heads = map(range, self.counts.shape)
        return [[torch.cat([one.pos[at].to(device) for one, at in self.places(b, h)]) for h in heads] for b in rows]

    def numbers(self, name: str, b: int, h: int, rows: slice) -> Tensor:
        """Unpack rows of the buffer "k" or "v" that belong to head (b, h): [n, D], fp32 if they are packed."""
        centre = self.centre[b, h] if name == "k" and self.centre is not None else None
        return kv.numbers(getattr(self, name)[rows], getattr(self, f"{name}_kind"), self.dim, centre)

    def held(self, length: Tensor) -> Held:
        """The first length [B, Hkv] slots of each head, as an op reads or writes them."""
        return Held(self.k, self.v, self.pos, self.offset, length, self.centre, self.k_kind, self.v_kind)

    def gathered(self: S) -> S:
        """All slots in one place, for reading."""
        return self

    def dense(self, name: str) -> Tensor:
        """Copy "k" or "v" into [B, Hkv, longest, D], with zeros after shorter heads."""
        whole, dense = self.gathered(), self.like.new_zeros(*self.len.shape, self.longest(), self.dim)
        for b, h, rows in whole.segments():
            dense[b, h, : rows.stop - rows.start] = whole.numbers(name, b, h, rows)
        return dense

    def tensors(self) -> tuple:
        """All tensors that take up memory, with the prefix's; of a shared buffer only as many rows as are lent."""
        if self.k is None:
            return ()
        prefix = () if self.prefix is None else self.prefix.tensors()
        lent = sum(region.rows for region in set(self.regions)) if self.regions else None
        centre = () if self.centre is None else (self.centre,)
        return *prefix, *(t[:lent] for t in self.buffers), self.offset, self.len, *centre

    def last(self: S, count: int | np.ndarray) -> S:
        """View the last `count` slots of each head, a number or [B], for reading only."""
        counts = np.zeros_like(self.counts) + np.reshape(count, (-1, 1))
        if self.prefix is not None and (self.counts < counts).any():
            return self.gathered().last(count)
        length = _ops.upload(counts, self.device, torch.int32)
        at, starts = self.offset + self.len - length, self.starts + self.counts - counts
        return replace(self, offset=at, len=length, counts=counts, starts=starts, prefix=None)

    def centred_at(self: S, centre: Tensor, known: np.ndarray | bool) -> S:
        """Set the centre of batch rows that have none yet: centre fp32 [B, Hkv, D]; known: bool [B] on the host, the
        rows for which it has one."""
        old = _ops.upload(self.centred, self.device, torch.bool)[:, None, None]
        both = torch.where(old, self.centre, centre)  # type: ignore[arg-type]  # packed keys have one
        return self._around(both, self.centred | known)

    def centred_as(self: S, other: Stored) -> S:
        """These slots with the centres of another storage, which may have centres for rows without a slot here."""
        if self.centre is None or other.centre is None:
            return self
        if self.on_host != other.on_host and (self.centred == other.centred).all():
            return self  # no copy between the two memories, and no wait for it
        return self._around(other.centre.to(self.device), other.centred)

    def _around(self: S, centre: Tensor, centred: np.ndarray) -> S:
        prefix = self.prefix if self.prefix is None or self.far else self.prefix._around(centre, centred)
        return replace(self, centre=centre, centred=centred, prefix=prefix)


class Later:
    """Slots that are read again at each use: an attribute is that of `read()`, unless it is among the `known` ones."""

    def __init__(self, read: Callable[[], object], **known: object) -> None:
        self._read = read
        self.__dict__.update(known)

    def __getattr__(self, name: str) -> object:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._read(), name)
