"""Read access to the slots of a layer, which lie in flat, ragged buffers. storage.py has the methods that change
them."""

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
    """The slots of a layer. Heads and batch rows may hold different numbers of slots; the slots of a head are in
    ascending order of position. A fork's slots begin with a `prefix`, which other forks share; the other fields
    describe only the slots after the prefix."""

    counts: np.ndarray = None  # type: ignore[assignment]  # [B, Hkv] `len` (slots of a head) on the host
    starts: np.ndarray = None  # type: ignore[assignment]  # [B, Hkv] `offset` (a head's first row) on the host
    regions: tuple = ()  # the `Region` or `Lent` of each batch row; empty if no pool or file has lent the buffers
    centred: np.ndarray = None  # type: ignore[assignment]  # bool [B] rows whose `centre` is set (packed keys only)
    like: Tensor = None  # type: ignore[assignment]  # [0, D] empty, with the width and dtype of new keys and values
    prefix: Stored | None = None  # the slots before the others; ops read only a prefix that has none itself
    on_host: bool = False  # the buffers are in the host's memory (pinned with CUDA), the layer is on another device

    is_centred = property(lambda self: self.centre is None or bool(self.centred.all()))
    buffers = property(lambda self: (self.k, self.v, self.pos))  # one row per slot
    device = property(lambda self: self.k.device)
    dim = property(lambda self: self.like.shape[1])
    kinds = property(lambda self: (self.k_kind, self.v_kind))
    in_parts = property(lambda self: self.prefix is not None and (self.counts.any() or self.prefix.prefix is not None))
    far = property(lambda self: self.prefix is not None and self.prefix.on_host and not self.on_host)

    @property
    def total_counts(self) -> np.ndarray:
        """The slot count of each head, the prefix's slots included: [B, Hkv] on the host."""
        return self.counts if self.prefix is None else self.prefix.total_counts + self.counts

    @property
    def total_len(self) -> Tensor:
        """`total_counts` as int32 [B, Hkv] on the device."""
        if self.far:
            return _ops.upload(self.total_counts, self.device, torch.int32)
        return self.len if self.prefix is None else self.prefix.total_len + self.len

    def longest(self) -> int:
        """Return the slot count of the fullest head, the prefix's slots included."""
        return int(self.total_counts.max()) if self.counts.size else 0

    def slot_bytes(self) -> int:
        """Count the bytes of one slot's key and value, with the scales of packed rows."""
        return sum(x.element_size() * x.shape[1] for x in (self.k, self.v))

    def live_bytes(self) -> int:
        """Count the bytes of all stored keys and values, the prefix's included."""
        return 0 if self.k is None else self.slot_bytes() * int(self.total_counts.sum())

    def padded_bytes(self) -> int:
        """Count what `live_bytes` would be if every head were padded to the slot count of the fullest head."""
        return self.slot_bytes() * self.counts.size * self.longest()

    def segments(self) -> Iterator[tuple[int, int, slice]]:
        """Yield (batch row b, head h, slice of the head's rows in the flat buffers), without the prefix's slots."""
        for b, (starts, counts) in enumerate(zip(self.starts.tolist(), self.counts.tolist(), strict=True)):
            for h, (start, count) in enumerate(zip(starts, counts, strict=True)):
                yield b, h, slice(start, start + count)

    def places(self, b: int, h: int) -> list[tuple[Stored, slice]]:
        """Return where the slots of head h of batch row b lie, in order: (storage, slice of rows in its buffers)."""
        before = [] if self.prefix is None else self.prefix.places(b, h)
        start = int(self.starts[b, h])
        return [*before, (self, slice(start, start + int(self.counts[b, h])))]

    def positions(self) -> list[list[Tensor]]:
        """Copy the positions of the slots, int32 tensors [batch row][head]. Those of a far storage (its prefix is in
        the host's memory) are copied to the host."""
        device = self.prefix.device if self.prefix is not None and self.far else self.device
        rows, heads = map(range, self.counts.shape)
        return [[torch.cat([one.pos[at].to(device) for one, at in self.places(b, h)]) for h in heads] for b in rows]

    def numbers(self, name: str, b: int, h: int, rows: slice) -> Tensor:
        """Unpack n rows of the buffer `name` ("k" or "v") that belong to head h of batch row b: [n, D], in fp32 if the
        buffer is packed."""
        centre = self.centre[b, h] if name == "k" and self.centre is not None else None
        return kv.numbers(getattr(self, name)[rows], getattr(self, f"{name}_kind"), self.dim, centre)

    def held(self, length: Tensor) -> Held:
        """Return the first length [B, Hkv] slots of each head in the form in which an op reads or writes them."""
        return Held(self.k, self.v, self.pos, self.offset, length, self.centre, self.k_kind, self.v_kind)

    def gathered(self: S) -> S:
        """Return all slots in one set of buffers, for reading only."""
        return self

    def dense(self, name: str) -> Tensor:
        """Copy the keys ("k") or values ("v") into [B, Hkv, longest, D], with zeros after a shorter head's slots."""
        whole, dense = self.gathered(), self.like.new_zeros(*self.len.shape, self.longest(), self.dim)
        for b, h, rows in whole.segments():
            dense[b, h, : rows.stop - rows.start] = whole.numbers(name, b, h, rows)
        return dense

    def tensors(self) -> tuple:
        """Return all tensors that take up memory, the prefix's included; of a pool's buffer only as many rows as it has
        lent to this storage."""
        if self.k is None:
            return ()
        prefix = () if self.prefix is None else self.prefix.tensors()
        lent = sum(region.rows for region in set(self.regions)) if self.regions else None
        centre = () if self.centre is None else (self.centre,)
        return *prefix, *(t[:lent] for t in self.buffers), self.offset, self.len, *centre

    def last(self: S, count: int | np.ndarray) -> S:
        """Return a view of the last `count` slots of each head, for reading only. count: one number, or [B, Hkv]."""
        counts = 0 * self.counts + count
        if self.prefix is not None and (self.counts < counts).any():
            return self.gathered().last(count)
        length = _ops.upload(counts, self.device, torch.int32)
        at, starts = self.offset + self.len - length, self.starts + self.counts - counts
        return replace(self, offset=at, len=length, counts=counts, starts=starts, prefix=None)

    def centred_at(self: S, centre: Tensor, known: np.ndarray | bool) -> S:
        """Set the key centres of batch rows that have none yet. centre: fp32 [B, Hkv, D]; known: bool [B] on the host,
        the batch rows for which `centre` is valid."""
        old = _ops.upload(self.centred, self.device, torch.bool)[:, None, None]
        both = torch.where(old, self.centre, centre)  # type: ignore[arg-type]  # packed keys have a centre
        return self._around(both, self.centred | known)

    def centred_as(self: S, other: Stored) -> S:
        """Return these slots with the key centres of `other`, which may also have centres for batch rows that have no
        slot here."""
        if self.centre is None or other.centre is None:
            return self
        if self.on_host != other.on_host and (self.centred == other.centred).all():
            return self  # nothing differs: avoid a copy between host and device, and the wait for it
        return self._around(other.centre.to(self.device), other.centred)

    def _around(self: S, centre: Tensor, centred: np.ndarray) -> S:
        prefix = self.prefix if self.prefix is None or self.far else self.prefix._around(centre, centred)
        return replace(self, centre=centre, centred=centred, prefix=prefix)


class Later:
    """A proxy for slots that are read again at each use: an attribute not given in `known` is looked up in the result
    of a new call of `read`."""

    def __init__(self, read: Callable[[], object], **known: object) -> None:
        self._read = read
        self.__dict__.update(known)

    def __getattr__(self, name: str) -> object:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._read(), name)
