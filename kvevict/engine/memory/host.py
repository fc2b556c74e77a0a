"""Copies of slots between the host's memory and a device (METHODS section 13). On a GPU they run beside the model's
computation, on a stream of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic

import torch
from torch import Tensor

from .stored import S, Stored

_streams: dict[torch.device, torch.cuda.Stream] = {}  # GPU -> the stream of all copies to and from it


def is_away(device: torch.device) -> bool:
    """Whether a device has its own memory, apart from the host's."""
    return device.type != "cpu"


def _has_streams(device: torch.device) -> bool:
    return device.type == "cuda"


def transfer(into: Stored, source: Stored) -> torch.cuda.Event | None:
    """Copy all slots of `source`, unchanged, to the first buffer rows of each head of `into`. One of the two storages
    is in the host's memory, the other on a device. On a GPU the returned event marks the end of the copy; call `wait`
    before the host reads the copied slots."""
    device = (source if into.on_host else into).device
    if not _has_streams(device):
        _copy(into, source)
        return None
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    stream = _streams[device]
    stream.wait_stream(torch.cuda.current_stream(device))  # until `source` is written and the rows of `into` are free
    with torch.cuda.stream(stream):
        _copy(into, source)
    if into.on_host:
        for tensor in source.buffers:
            tensor.record_stream(stream)  # so that the source's memory is not reused before the copy has ended
    return stream.record_event()


def _copy(into: Stored, source: Stored) -> None:
    for to, rows in _pairs(into, source):
        # A copy to pageable memory (a file) blocks, since no event would tell when the host may read the copied rows.
        to.copy_(rows, non_blocking=not into.on_host or to.is_pinned())


def _pairs(into: Stored, source: Stored) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of tensors, for each buffer of each head: rows of `into` to write, and rows of `source` to read."""
    for b, heads in enumerate(into.starts.tolist()):
        for h, start in enumerate(heads):
            for storage, rows in source.places(b, h):
                stop = start + rows.stop - rows.start
                for mine, theirs in zip(into.buffers, storage.buffers, strict=True):
                    yield mine[start:stop], theirs[rows]
                start = stop


def wait() -> None:
    """Block the host until all queued copies, to the host's memory and to devices, have ended."""
    for stream in list(_streams.values()):
        stream.synchronize()


class Coming(Generic[S]):
    """A running copy of all slots of a far storage, whose prefix is in the host's memory, to `into` on its device.

    The memory of `into` belongs to the stream on which the model computes, and that stream may use or free the memory
    only after the copy: the method `slots` and this object's destructor make the stream wait.
    """

    def __init__(self, into: S, far: S) -> None:
        self._event: torch.cuda.Event | None = None
        self._slots = into
        if _has_streams(into.device):
            self._stream = torch.cuda.current_stream(into.device)
        self._event = transfer(into, far)

    def slots(self) -> S:
        """Return the copied slots, for use by work that is queued on the model's stream from now on."""
        self.__del__()
        return self._slots

    def __del__(self) -> None:
        event, self._event = self._event, None
        if event is not None:
            self._stream.wait_event(event)
