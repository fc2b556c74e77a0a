"""Slots in the host's memory, of layers on another device (docs/methods.md section 13, "Place"): how they go there, and
come back to be read. On a GPU a stream beside the model's copies them, while the model computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from .mapped import Files
    from .pool import Pool
    from .storage import Storage

_streams: dict[torch.device, torch.cuda.Stream] = {}  # one beside the model's, for the copies of a device


def is_away(device: torch.device) -> bool:
    """Whether the host's memory is another one than that of a layer's slots."""
    return device.type != "cpu"


def _has_streams(device: torch.device) -> bool:
    return device.type == "cuda"


def elsewhere(
    storage: Storage,
    device: torch.device,
    on_host: bool,
    pool: Pool | Files | None = None,
    prefix: Storage | None = None,
) -> Storage:
    """As `Storage.blank`, in another memory."""
    k, v, pos = (t[:0].to(device) for t in storage.buffers)
    centre = None if storage.centre is None else storage.centre.to(device)
    length, like = torch.zeros(storage.counts.shape, dtype=torch.int32, device=device), storage.like.to(device)
    there = replace(storage, k=k, v=v, pos=pos, like=like, centre=centre, len=length, on_host=on_host)
    return there.blank(pool, prefix)


def beside(far: Storage, capacity: np.ndarray) -> Storage:
    """Buffers of a capacity for all slots of a far storage, on its device, which count them already."""
    into = replace(far, pool=None, prefix=None)._blank(capacity)
    return replace(into, pool=far.pool)._holding(far.total_len, far.total_counts)


def transfer(into: Storage, source: Storage) -> torch.cuda.Event | None:
    """Copy all slots of `source` to the start of each head of `into`, bit by bit, from one memory to the other. On a
    GPU they are there after the event that is returned; `wait` before the host reads them."""
    device = (source if into.on_host else into).device
    if not _has_streams(device):
        _copy(into, source)
        return None
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    stream = _streams[device]
    stream.wait_stream(torch.cuda.current_stream(device))  # the source is written, the rows of `into` are free
    with torch.cuda.stream(stream):
        _copy(into, source)
    if into.on_host:
        for tensor in source.buffers:
            tensor.record_stream(stream)  # its memory is not lent again before it is copied
    return stream.record_event()


def _copy(into: Storage, source: Storage) -> None:
    for to, rows in _pairs(into, source):
        # A copy to pageable memory (a file) has to end here: nothing else tells when it may be read.
        to.copy_(rows, non_blocking=not into.on_host or to.is_pinned())


def _pairs(into: Storage, source: Storage) -> Iterator[tuple[Tensor, Tensor]]:
    """The rows of `into` that are written, and those of `source`."""
    for b, heads in enumerate(into.starts.tolist()):
        for h, start in enumerate(heads):
            for storage, rows in source.places(b, h):
                stop = start + rows.stop - rows.start
                for mine, theirs in zip(into.buffers, storage.buffers, strict=True):
                    yield mine[start:stop], theirs[rows]
                start = stop


def wait() -> None:
    """Wait until all slots that were sent to the host's memory are there, and those read from it are read."""
    for stream in list(_streams.values()):
        stream.synchronize()


class Coming:
    """A copy, on a layer's device, of all slots of a storage whose prefix lies in the host's memory.

    Its memory is that of the stream of the model, which may use or free it only after the copy: `slots` has that stream
    wait, and so does the end of this object.
    """

    def __init__(self, far: Storage, capacity: np.ndarray) -> None:
        self._event: torch.cuda.Event | None = None
        self._slots = beside(far, capacity)
        if _has_streams(self._slots.device):
            self._stream = torch.cuda.current_stream(self._slots.device)
        self._event = transfer(self._slots, far)

    def slots(self) -> Storage:
        """The copy, for what the stream does from here on."""
        self.__del__()
        return self._slots

    def __del__(self) -> None:
        event, self._event = self._event, None
        if event is not None:
            self._stream.wait_event(event)
