"""Copies of slots between the host's memory and a device, on a GPU beside the computation (METHODS section 13)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic

import torch
from torch import Tensor

from .stored import S, Stored

_streams: dict[torch.device, torch.cuda.Stream] = {}  # device -> the stream of its copies


def is_away(device: torch.device) -> bool:
    """Whether a layer's device has another memory than the host's."""
    return device.type != "cpu"


def _has_streams(device: torch.device) -> bool:
    return device.type == "cuda"


def transfer(into: Stored, source: Stored) -> torch.cuda.Event | None:
    """Copy all slots of `source` to the start of each head of `into`, in the other memory, bit by bit. On a GPU they
    are there after the event that is returned; call `wait` before the host reads them."""
    device = (source if into.on_host else into).device
    if not _has_streams(device):
        _copy(into, source)
        return None
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    stream = _streams[device]
    stream.wait_stream(torch.cuda.current_stream(device))  # until the source is written and the rows of `into` are free
    with torch.cuda.stream(stream):
        _copy(into, source)
    if into.on_host:
        for tensor in source.buffers:
            tensor.record_stream(stream)  # do not use the memory of the source again before it is copied
    return stream.record_event()


def _copy(into: Stored, source: Stored) -> None:
    for to, rows in _pairs(into, source):
        # A copy to pageable memory (a file) blocks: no event would tell when the host may read it.
        to.copy_(rows, non_blocking=not into.on_host or to.is_pinned())


def _pairs(into: Stored, source: Stored) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the rows of `into` to be written, each with the rows of `source` to be read."""
    for b, heads in enumerate(into.starts.tolist()):
        for h, start in enumerate(heads):
            for storage, rows in source.places(b, h):
                stop = start + rows.stop - rows.start
                for mine, theirs in zip(into.buffers, storage.buffers, strict=True):
                    yield mine[start:stop], theirs[rows]
                start = stop


def wait() -> None:
    """Wait for all copies, in both directions."""
    for stream in list(_streams.values()):
        stream.synchronize()


class Coming(Generic[S]):
    """A copy of all slots of a far storage, on its way to the buffers `into` on the storage's device.

    The model's stream owns the memory of `into`, and may use or free it only after the copy: `slots` and the end of
    this object make that stream wait.
    """

    def __init__(self, into: S, far: S) -> None:
        self._event: torch.cuda.Event | None = None
        self._slots = into
        if _has_streams(into.device):
            self._stream = torch.cuda.current_stream(into.device)
        self._event = transfer(into, far)

    def slots(self) -> S:
        """The copy, for all work that is queued on the stream from here on."""
        self.__del__()
        return self._slots

    def __del__(self) -> None:
        event, self._event = self._event, None
        if event is not None:
            self._stream.wait_event(event)
