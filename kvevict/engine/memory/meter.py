"""The cost of a read: time, bytes, and the report that `kvevict.report` shows."""

import math
import time
from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as Items
from itertools import chain

import numpy as np
import torch

from ... import cautions
from ...policy import kv
from ...policy.rows import Found
from .layer import EvictionLayer
from .mapped import places
from .rows import Apart
from .stateful import tensors_of
from .storage import Storage

Positions = list[list[torch.Tensor]]  # positions of a layer's slots, int32 [batch row][kv head]


class _Clock:
    """A context manager that adds the time spent in it to a stage. It is a class because a generator would be slower,
    and a decoded token enters many clocks."""

    __slots__ = ("seconds", "stage", "start")

    def __init__(self, seconds: dict[str, float], stage: str) -> None:
        self.seconds, self.stage = seconds, stage

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.seconds[self.stage] += time.perf_counter() - self.start


class Meter:
    """Measures one read and the tokens decoded after it, in one thread."""

    def __init__(self, live: Iterable[tuple[int | str, int]] = ()) -> None:
        self.live = dict(live)  # layer, or "draft" -> bytes of its stored keys and values
        self.peak = 0  # the most bytes of keys and values at any time, those of chunks not stored yet included
        self.seconds: dict[str, float] = defaultdict(float)  # stage -> seconds
        self.replayed = 0  # number of tokens decoded after the read by replaying a recording
        self.checks = 0  # number of calls since the read that checked drafted tokens (hook/ahead.py)
        self.checked = 0  # number of tokens that they checked
        self.replaced = 0  # number of these that were replaced
        self.unrecorded: str | None = None  # the reason why the last decoded token was not to be recorded
        # For each layer the positions of its slots (before the recall, right after it); None: nothing was recalled
        self.recalls: list[tuple[Positions, Positions]] | None = None
        self.back: list[tuple[Positions, Positions]] | None = None  # `recalls` of the read that `report` is about
        self.question: tuple[Found, ...] = ()  # of each batch row; (): the policy looks for no question
        self.stored: list[np.ndarray] = []  # slots [B, Hkv] of each layer that evicts, after the last decoded token
        self.report: dict | None = None
        # layer -> bools, per chunk one for keys and one for values: a norm exceeds the largest that can be packed
        self.beyond: dict[int, list[torch.Tensor]] = defaultdict(list)

    def clock(self, stage: str) -> _Clock:
        """Return a context manager whose time counts as part of a stage."""
        return _Clock(self.seconds, stage)

    def watch(self, new: torch.Tensor, tokens: np.ndarray, layers: int) -> None:
        """Update `peak` by the bytes of keys and values that are alive now: all stored slots, and a chunk's new slots
        in `layers` layers (the running layer, and layers that wait for their cuts).

        new      the running layer's new keys [B, Hkv, *, W]
        tokens   [B] number of the chunk's tokens
        """
        row = 2 * new.element_size() * new.shape[3] * new.shape[1]
        self.peak = max(self.peak, sum(self.live.values()) + layers * row * int(tokens.sum()))

    def weigh(self, index: int, storage: Storage | Apart, *new: torch.Tensor) -> None:
        """Note whether the norm of a layer's new keys or values exceeds the largest that packed rows of `storage` can
        hold. new: keys and values, each [B, Hkv, S, D]."""
        for x, kind, centre in zip(new, storage.kinds, (storage.centre, None), strict=True):
            most = kv.ROW_KINDS[kind].most
            if most < math.inf:
                x = x if centre is None else x - centre.to(x.device)[:, :, None]
                self.beyond[index].append((kv.norms(x) > most).any())

    def write(self, layers: list[EvictionLayer | None], kind: str, every: Items[Storage | Apart]) -> None:
        """Write the report of a read. layers: the cache's layers, None for each that nothing is evicted from; kind: the
        name in `kv.KINDS` that the run asked for; every: each layer's slots of all tokens, [] without recall."""
        own = [layer for layer in layers if layer is not None]
        assert own[0].sequence.seen is not None
        live, seen = sum(layer.live_bytes() for layer in own), own[0].sequence.seen.tolist()
        slots = sum(layer.counts.sum(1) for layer in own).tolist()
        archive = sum(map(_archived_bytes, every))
        beside = sum(t.nbytes for each in every for t in each.tensors()) - archive
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
            bits=[layer and _bits(layer.storage) for layer in layers],
            wider_keys=[i for i, layer in enumerate(layers) if layer and kv.is_wider(layer.storage.kinds, kind)],
            padded_bytes=sum(layer.padded_bytes() for layer in own),
            peak_cache_bytes=max(self.peak, live),
            archive_bytes=archive,
            archive_in=_places(every[0]) if every else None,
            overhead_bytes=sum(map(allocated_bytes, own)) + beside - live,
            positions=positions,
        )

    def recalled(self) -> list | None:
        """Count the evicted slots that the read of `report` recalled and kept: [layer][batch row][head]. None if that
        read recalled nothing."""
        if self.back is None or self.report is None:
            return None
        back = iter(self.back)
        return [None if now is None else _recalled(*next(back), now) for now in self.report["positions"]]


def _recalled(kept: Positions, whole: Positions, now: Positions) -> list:
    """Count the slots that a recall brought back for good: [batch row][head] number of positions that are held `now`,
    were in the `whole` archive, and were not `kept` before the recall."""
    each = [
        (torch.isin(has.to(every.device), every) & ~torch.isin(has, before).to(every.device)).sum()
        for before, every, has in zip(chain(*kept), chain(*whole), chain(*now), strict=True)
    ]
    return torch.stack(each).view(len(now), -1).tolist()


def _bits(storage: Storage) -> list[int]:
    """Return [bits per number of the stored keys, bits per number of the stored values]."""
    return [kv.ROW_KINDS[kind].bits or 8 * storage.like.element_size() for kind in storage.kinds]


def _places(archive: Storage | Apart) -> str:
    """Return where an archive is: a file, a folder, the name of a device, or several of these."""
    each = archive.each if isinstance(archive, Apart) else [archive]
    return ", ".join(dict.fromkeys(place for one in each for place in places(one)))


def _archived_bytes(archive: Storage | Apart) -> int:
    """Count the bytes of an archive's slots: keys, values and positions."""
    each = archive.each if isinstance(archive, Apart) else [archive]
    return sum(one.live_bytes() + kv.POSITION * int(one.total_counts.sum()) for one in each)


def allocated_bytes(layer: object) -> int:
    """Count the bytes of all tensors of a cache layer."""
    return sum(t.nbytes for t in tensors_of(layer))
