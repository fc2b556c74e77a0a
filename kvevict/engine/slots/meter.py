"""The cost of a read: its clocks, the live bytes, and the report that `kvevict.report` shows."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from ...policy import kv
from .layers import archived, tensors_of


class _Clock:
    """A context that adds its time to a stage. It is no generator, for speed: a decoded token enters several in every
    layer."""

    __slots__ = ("seconds", "stage", "start")

    def __init__(self, seconds: Any, stage: str) -> None:
        self.seconds, self.stage = seconds, stage

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.seconds[self.stage] += time.perf_counter() - self.start


class Meter:
    """Measures one read and the tokens decoded after it, in one thread."""

    def __init__(self, live: Any = ()) -> None:
        self.live = dict(live)  # layer -> live KV bytes stored
        self.peak = 0  # the most of them at once, chunks in flight included
        self.seconds = defaultdict(float)
        self.replayed = 0  # decoded tokens since then that were replayed
        self.lost: Iterator | None = None  # each layer's lost[row][head], bool by position; None: nothing was recalled
        self.report: dict | None = None

    def clock(self, stage: str) -> _Clock:
        """A context whose time counts as the stage's."""
        return _Clock(self.seconds, stage)

    def watch(self, new: torch.Tensor, padding: np.ndarray, layers: int) -> None:
        """Live KV bytes right now: all stored slots, and the chunks of `layers` layers (this one, those that wait).
        new: keys [B, Hkv, S, W] of a layer's chunk with padding [B]."""
        row = 2 * new.element_size() * new.shape[3] * new.shape[1]
        chunk = int((new.shape[2] - padding).sum())
        self.peak = max(self.peak, sum(self.live.values()) + layers * row * chunk)

    def note_recall(self, kept: list, whole: list) -> None:
        """Positions [layer][row][head] of the slots before all came back, and after; a cut then chooses some."""

        def lost(kept: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
            mask = torch.zeros(int(whole[-1]) + 1 if len(whole) else 0, dtype=torch.bool, device=whole.device)
            mask[whole.long()] = True
            mask[kept.long()] = False
            return mask

        self.lost = iter([_by_head(lost, *layer) for layer in zip(kept, whole, strict=True)])

    def write(self, layers: list[Any], kind: str) -> None:
        """The report of a read that is done. layers: of the cache, None for those that do not evict; kind: of
        `kv.KINDS`."""
        own = [layer for layer in layers if layer is not None]
        live, seen = sum(layer.live_bytes() for layer in own), own[0].sequence.seen.tolist()
        slots = sum(layer.counts.sum(1) for layer in own).tolist()
        archive = sum(t.nbytes for layer in own for t in archived(layer))
        heads = sum(layer.counts.shape[1] for layer in own)
        self.report = dict(
            seen=seen,
            kept=[None if layer is None else layer.counts.tolist() for layer in layers],
            kept_share=[n / (heads * tokens) if tokens else 1.0 for n, tokens in zip(slots, seen, strict=True)],
            cache_bytes=live,
            full_cache_bytes=sum(seen) * sum(layer.counts.shape[1] * _new_bytes(layer.storage.like) for layer in own),
            bits=[None if layer is None else _bits(layer) for layer in layers],
            wider_keys=[
                index for index, layer in enumerate(layers) if layer and kv.is_wider(layer.storage.kinds, kind)
            ],
            padded_bytes=sum(layer.padded_bytes() for layer in own),
            peak_cache_bytes=max(self.peak, live),
            archive_bytes=archive,
            recalled=self.lost and [None if layer is None else _recalled(next(self.lost), layer) for layer in layers],
            overhead_bytes=sum(map(allocated_bytes, own)) - live - archive,
            positions=[None if layer is None else layer.positions() for layer in layers],
        )


def _by_head(function: Callable[..., Any], *values: list) -> list:
    """[row][head] results for values of [row][head]."""
    return [[function(*each) for each in zip(*row, strict=True)] for row in zip(*values, strict=True)]


def _recalled(lost: list, layer: Any) -> list:
    """[row][head] how many of the slots are among the lost ones."""
    return _by_head(lambda lost, has: int(lost[has[has < len(lost)].long()].sum()), lost, layer.positions())


def _new_bytes(like: torch.Tensor) -> int:
    """Bytes of a key and a value as they are computed."""
    return 2 * like.element_size() * like.shape[1]


def _bits(layer: Any) -> list:
    """Bits of a number of a layer's stored keys and values."""
    return [kv.LAYOUTS[kind].bits or 8 * layer.storage.like.element_size() for kind in layer.storage.kinds]


def allocated_bytes(layer: Any) -> int:
    """Bytes of all tensors of a cache layer."""
    return sum(t.nbytes for t in tensors_of(layer))
