"""Copy-on-write forks: one cache, many continuations, each of which shares what was stored before it."""

from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np
import torch

from .. import _ops
from .storage import ROOM, Storage


@dataclass
class Fork:
    """A storage whose slots are those of a prefix, which others may read too and which is never written to, and a
    suffix of its own: the tokens that came since.

    What needs all slots in one place (eviction, crop, another order of rows, saving) gets a plain `Storage`.
    """

    prefix: Storage
    suffix: tuple  # k, v [B, Hkv, room, D] and pos [B, room]
    appended: int  # columns of the suffix that are in use
    len: torch.Tensor  # [B, Hkv] int32, prefix and suffix
    counts: np.ndarray  # len on the host
    shared = True

    k = property(attrgetter("prefix.k"))
    v = property(attrgetter("prefix.v"))
    pos = property(attrgetter("prefix.pos"))
    offset = property(attrgetter("prefix.offset"))
    device = property(attrgetter("prefix.device"))
    longest, live_bytes, padded_bytes = Storage.longest, Storage.live_bytes, Storage.padded_bytes

    def append(self, k, v, pos, first, padding, expected=0):
        """As `Storage.append`. A suffix has no padding."""
        if padding.any():
            return self.copy_on_write().append(k, v, pos, first, padding, expected)
        return self._longer(k, v, pos)

    def keep(self, *what):
        """As `Storage.keep`; never in place, as the prefix is shared."""
        return self.gathered().keep(*what)

    def decode(self, q, k, v, pos, expected=0, columns=0, **options):
        """As `Storage.decode`, without probabilities: whoever wants those has a chooser."""
        twin = self._longer(k, v, pos)
        k, v, _ = twin._appended()
        none = torch.zeros(len(q), dtype=torch.int32, device=q.device)
        here = self.k, self.v, self.offset, self.prefix.len
        return (*_ops.attend(q, *here, k, v, none, **options), None), twin

    def crop(self, count: int):
        return self.copy_on_write().crop(count)

    def rows(self, chosen):
        return self.gathered().rows(chosen)

    def copy_on_write(self):
        """A plain storage of its own with all slots."""
        none = torch.zeros(len(self.counts), dtype=torch.int32, device=self.device)
        return self.prefix.moved(self.prefix.grown(self.counts), None, self.counts, *self._appended(), none)

    def gathered(self):
        """All slots in one place, to be read: the prefix as long as nothing came after it."""
        return self.copy_on_write() if self.appended else self.prefix

    def tensors(self) -> tuple:
        """What is shared counts too."""
        return *self.prefix.tensors(), *self.suffix

    def positions(self) -> list:
        fronts, own = self.prefix.positions(), self._appended()[2]
        return [[torch.cat([head, more]) for head in row] for row, more in zip(fronts, own, strict=True)]

    def dense(self, name):
        return self.gathered().dense(name)

    def _appended(self):
        """Keys, values [B, Hkv, n, D] and positions [B, n] of the suffix."""
        k, v, pos = self.suffix
        n = self.appended
        return k[:, :, :n], v[:, :, :n], pos[:, :n].contiguous()

    def _longer(self, k, v, pos):
        """With new columns in the suffix."""
        start, end, suffix = self.appended, self.appended + k.shape[2], self.suffix
        if end > suffix[0].shape[2]:
            more = end + max(end // 8, ROOM) - start
            with torch.inference_mode(False):
                suffix = tuple(
                    torch.cat([own, own.new_empty(*own.shape[:at], more, *own.shape[at + 1 :])], at)
                    for own, at in zip(self._appended(), (2, 2, 1), strict=True)
                )
        suffix[0][:, :, start:end], suffix[1][:, :, start:end], suffix[2][:, start:end] = k, v, pos
        added = end - start
        return Fork(self.prefix, suffix, end, self.len + added, self.counts + added)


def fork(storage) -> Fork:
    """A fork of a storage that is not empty; of a fork it shares the prefix and copies the suffix."""
    if isinstance(storage, Fork):
        return replace(storage, suffix=tuple(t.clone() for t in storage.suffix))
    storage.shared = True
    batch, heads = storage.counts.shape
    none = storage.k.new_empty(batch, heads, 0, storage.k.shape[1])
    suffix = none, none.clone(), storage.pos.new_empty(batch, 0)
    return Fork(storage, suffix, 0, storage.len, storage.counts)
