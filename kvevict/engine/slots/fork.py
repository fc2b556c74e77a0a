"""Copy-on-write forks: one cache, many continuations that share its slots."""

from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter

import numpy as np
import torch

from ... import _ops
from . import host
from .storage import ROOM, Storage


@dataclass
class Fork:
    """A storage of two parts: a prefix, shared with other readers and never written to, and a private suffix with the
    tokens that came since. Several batch rows may share one row of the prefix.

    Callers that need all slots in one place (eviction, crop, saving) get a plain `Storage`.
    """

    prefix: Storage
    suffix: tuple  # k, v [B * Hkv * room, D] and pos [B * Hkv * room], with `room` rows for every head
    room: int
    appended: int  # suffix rows in use, the same for every head
    front: np.ndarray  # [B] how many of these are padding, the first ones; on the host
    own_offset: torch.Tensor  # [B, Hkv] int64, first suffix row of each head after the padding
    own_len: torch.Tensor  # [B, Hkv] int32, `appended` of each head without the padding
    counts: np.ndarray  # [B, Hkv] slots of prefix and suffix, on the host
    shared = True

    @cached_property
    def len(self):
        """[B, Hkv] int32, slots of prefix and suffix."""
        return self.prefix.len + self.own_len

    k = property(attrgetter("prefix.k"))
    v = property(attrgetter("prefix.v"))
    pos = property(attrgetter("prefix.pos"))
    offset = property(attrgetter("prefix.offset"))
    device = property(attrgetter("prefix.device"))
    longest, live_bytes, padded_bytes = Storage.longest, Storage.live_bytes, Storage.padded_bytes

    def append(self, k, v, pos, first, padding, expected=0):
        """As `Storage.append`. A suffix has padding only before its tokens."""
        if (self.front[padding > 0] < self.appended).any():
            return self.copy_on_write().append(k, v, pos, first, padding, expected)
        start, end = self.appended, self.appended + k.shape[2]
        into = self._with_room(end - start)
        for own, new in zip(into._columns(), (k, v, pos[:, None]), strict=True):
            own[:, :, start:end] = new
        grown = into._grown(end - start)
        if not padding.any():
            return grown
        own = dict(own_offset=grown.own_offset + first[:, None], own_len=grown.own_len - first[:, None])
        return replace(grown, **own, front=grown.front + padding, counts=grown.counts - padding[:, None])

    def keep(self, *what):
        """As `Storage.keep`; never in place, as the prefix is shared."""
        return self.gathered().keep(*what)

    def decode(self, q, k, v, pos, expected=0, columns=0, **options):
        """As `Storage.decode`, with the prefix as the first segment of the same kernel. No probabilities: callers that
        want them have a chooser."""
        into, shared = self if self.appended < self.room else self._with_room(1), self.prefix
        result = _ops.decode(
            q, k, v, pos, *into.suffix, into.own_offset, into.own_len, k_prefix=shared.k, v_prefix=shared.v,
            prefix_offset=shared.offset, prefix_len=shared.len, **options,
        )  # fmt: skip
        return result, into._grown(1)

    def crop(self, count: int):
        return self.copy_on_write().crop(count)

    def rows(self, chosen):
        """As `Storage.rows`; the prefix is shared, the suffix copied."""
        at = chosen.tolist()
        source = [own[chosen] for own in self._columns()]
        own = dict(front=self.front[at], own_len=self.own_len[chosen], counts=self.counts[at])
        into = replace(self, prefix=self.prefix.aliased(chosen), **own, own_offset=self._padded()[chosen], room=0)
        return into._in_suffix(self.room, source)

    def copy_on_write(self):
        """A private plain storage with all slots."""
        first = host.upload(self.front, self.device, torch.int32)
        return self.prefix.moved(self.prefix.grown(self.counts), None, self.counts, *self._appended(), first)

    def gathered(self):
        """All slots in one place, for reading: the prefix itself while the suffix is empty."""
        return self.copy_on_write() if self.appended else self.prefix

    def tensors(self) -> tuple:
        """All tensors, the shared ones too."""
        return *self.prefix.tensors(), *self.suffix

    def positions(self) -> list:
        fronts, own = self.prefix.positions(), self._appended()[2]
        own = [more[padding:] for more, padding in zip(own, self.front, strict=True)]
        return [[torch.cat([head, more]) for head in row] for row, more in zip(fronts, own, strict=True)]

    def dense(self, name):
        return self.gathered().dense(name)

    def _columns(self):
        """The suffix as k, v [B, Hkv, room, D] and pos [B, Hkv, room]."""
        return [t.view(*self.counts.shape, self.room, *t.shape[1:]) for t in self.suffix]

    def _appended(self):
        """Keys, values [B, Hkv, n, D] and positions [B, n] of the suffix."""
        k, v, pos = (t[:, :, : self.appended] for t in self._columns())
        return k, v, pos[:, 0].contiguous()

    def _padded(self):
        """[B, Hkv] int64 rows of padding before each head's suffix."""
        return self.own_offset - torch.arange(self.counts.size, device=self.device).view(self.counts.shape) * self.room

    def _grown(self, count):
        """A fork that counts `count` more columns, already written to the suffix."""
        own = self.room, self.appended + count, self.front, self.own_offset, self.own_len + count
        return Fork(self.prefix, self.suffix, *own, self.counts + count)

    def _with_room(self, count):
        """A fork with room for `count` more columns."""
        n = self.appended
        if n + count <= self.room:
            return self
        into = replace(self, own_offset=self._padded(), room=0)
        return into._in_suffix(n + count + max((n + count) // 8, ROOM), self._columns())

    def _in_suffix(self, room, columns):
        """With the columns [B, Hkv, *, D] in use in a new suffix; here without one, `own_offset` being `_padded`."""
        n, heads = self.appended, self.counts.size
        with torch.inference_mode(False):  # a suffix made in inference mode can be written to outside of it
            suffix = tuple(own.new_empty(heads * room, *own.shape[1:]) for own in self.suffix)
            offset = torch.arange(heads, device=self.device).view(self.counts.shape) * room + self.own_offset
        into = replace(self, suffix=suffix, room=room, own_offset=offset)
        for new, own in zip(into._columns(), columns, strict=True):
            new[:, :, :n] = own[:, :, :n]
        return into


def fork(storage) -> Fork:
    """A fork of a non-empty storage. A fork's fork shares the prefix and copies the suffix."""
    if isinstance(storage, Fork):
        return replace(storage, suffix=tuple(t.clone() for t in storage.suffix))
    storage.shared = True
    none = tuple(t.new_empty(0, *t.shape[1:]) for t in (storage.k, storage.v, storage.pos))
    own = torch.zeros_like(storage.offset), torch.zeros_like(storage.len)
    return Fork(storage, none, 0, 0, np.zeros(len(storage.counts), np.int64), *own, storage.counts)
