"""The cost of a read: its clocks, the live bytes, and the report that `kvevict.report` shows."""

import math
import time
from collections import defaultdict
from itertools import chain
from typing import Any

import numpy as np
import torch

from ... import cautions
from ...policy import kv
from .archive import Apart
from .mapped import in_file
from .stateful import archived, tensors_of
from .storage import Storage


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
        # Of each layer the positions [row][head] of its slots before all came back, and after; None: nothing came back.
        self.recalls: list[tuple[list, list]] | None = None
        self.back: list[tuple[list, list]] | None = None  # those of the read that `report` tells of
        self.report: dict | None = None
        self.beyond = defaultdict(list)  # layer -> of chunks: whether rows are more than its packed slots hold

    def clock(self, stage: str) -> _Clock:
        """A context whose time counts as the stage's."""
        return _Clock(self.seconds, stage)

    def watch(self, new: torch.Tensor, tokens: np.ndarray, layers: int) -> None:
        """Live KV bytes right now: all stored slots, and the chunks of `layers` layers (this one, those that wait).
        new: keys [B, Hkv, *, W] of a layer's chunk of tokens [B]."""
        row = 2 * new.element_size() * new.shape[3] * new.shape[1]
        self.peak = max(self.peak, sum(self.live.values()) + layers * row * int(tokens.sum()))

    def weigh(self, index: int, storage: Storage | Apart, *new: torch.Tensor) -> None:
        """Note whether keys and values [B, Hkv, S, D] of a layer's chunk are more than the kinds of a storage hold."""
        for x, kind, centre in zip(new, storage.kinds, (storage.centre, None), strict=True):
            most = kv.ROW_KINDS[kind].most
            if most < math.inf:
                x = x if centre is None else x - centre.to(x.device)[:, :, None]
                self.beyond[index].append((kv.norms(x) > most).any())

    def write(self, layers: list[Any], kind: str) -> None:
        """The report of a read that is done. layers: of the cache, None for those that do not evict; kind: of
        `kv.KINDS`."""
        own = [layer for layer in layers if layer is not None]
        live, seen = sum(layer.live_bytes() for layer in own), own[0].sequence.seen.tolist()
        slots = sum(layer.counts.sum(1) for layer in own).tolist()
        archive = sum(t.nbytes for layer in own for t in archived(layer))
        heads = sum(layer.counts.shape[1] for layer in own)
        storages = [layer.storage for layer in own]
        computed = sum(2 * one.counts.shape[1] * one.like.element_size() * one.dim for one in storages)
        positions = [None if layer is None else layer.positions() for layer in layers]
        self.back, self.recalls = self.recalls, None
        cautions.of_norms([index for index, found in self.beyond.items() if any(map(bool, found))])
        self.report = dict(
            seen=seen,
            kept=[None if layer is None else layer.counts.tolist() for layer in layers],
            kept_share=[n / (heads * tokens) if tokens else 1.0 for n, tokens in zip(slots, seen, strict=True)],
            cache_bytes=live,
            full_cache_bytes=sum(seen) * computed,
            bits=[
                layer
                and [kv.ROW_KINDS[kind].bits or 8 * layer.storage.like.element_size() for kind in layer.storage.kinds]
                for layer in layers
            ],
            wider_keys=[
                index for index, layer in enumerate(layers) if layer and kv.is_wider(layer.storage.kinds, kind)
            ],
            padded_bytes=sum(layer.padded_bytes() for layer in own),
            peak_cache_bytes=max(self.peak, live),
            archive_bytes=archive,
            archive_in=_place(own[0].archive),
            overhead_bytes=sum(map(allocated_bytes, own)) - live - archive,
            positions=positions,
        )

    def recalled(self) -> list | None:
        """[layer][row][head] the slots that came back in the read of `report`; None: nothing could."""
        if self.back is None or self.report is None:
            return None
        back = iter(self.back)
        return [None if now is None else _recalled(*next(back), now) for now in self.report["positions"]]


def _recalled(kept: list, whole: list, now: list) -> list:
    """[row][head] how many slots came back. All three: positions [row][head]."""
    each = [
        (torch.isin(has.to(every.device), every) & ~torch.isin(has, before).to(every.device)).sum()
        for before, every, has in zip(chain(*kept), chain(*whole), chain(*now), strict=True)
    ]
    return torch.stack(each).view(len(now), -1).tolist()


def _place(archive: Storage | Apart | None) -> str | None:
    """The memory that an archive lies in."""
    if archive is None:
        return None
    one = archive.each[0] if isinstance(archive, Apart) else archive
    return "files" if in_file(one) else str(one.device)


def allocated_bytes(layer: Any) -> int:
    return sum(t.nbytes for t in tensors_of(layer))
