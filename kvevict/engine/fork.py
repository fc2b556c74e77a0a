"""One cache, many ways on from it: layers that share what another one stored."""

import copy

import torch

from .. import _ops
from .cache import ROOM, EvictionLayer
from .context import current


class ForkedLayer(EvictionLayer):
    """Reads the first `front` [B, Hkv] slots of every head in another layer's storage, which it never writes to, and
    has the tokens that came since in a tail of its own. `len` and `counts` are of both.

    What needs all slots in one storage (eviction, crop, another order of rows, saving) has them copied there, and the
    layer is then a plain `EvictionLayer`.
    """

    front: torch.Tensor
    appended: int
    tail_k: torch.Tensor
    tail_v: torch.Tensor
    tail_pos: torch.Tensor

    @classmethod
    def of(cls, layer):
        """A fork of a layer that has stored something. A fork's fork shares the same storage and copies the tail."""
        twin = copy.copy(layer)
        layer.shared = twin.shared = True
        if isinstance(layer, cls):
            twin.tail_k, twin.tail_v, twin.tail_pos = (t.clone() for t in (layer.tail_k, layer.tail_v, layer.tail_pos))
        else:
            twin.__class__ = cls
            twin.front, twin.appended = layer.len, 0
            batch, heads = layer.len.shape
            twin.tail_k = layer.k.new_empty(batch, heads, 0, layer.k.shape[1])
            twin.tail_v, twin.tail_pos = torch.empty_like(twin.tail_k), layer.pos.new_empty(batch, 0)
        return twin

    def update(self, key_states, value_states, *args, **kwargs):
        step = current()
        if step is not None and (step.chooser is not None if step.decoding else self.appended):
            self.own()  # a chooser looks at stored slots in one place
        elif step is not None and step.patch.readers:
            self.own()  # as do layers that read another's
        return EvictionLayer.update(self, key_states, value_states, *args, **kwargs)  # it may be no fork any more

    def append(self, k, v, pos, first, padding) -> None:
        if padding.any():
            self.own()
            EvictionLayer.append(self, k, v, pos, first, padding)
            return
        self._put(k, v, pos)

    def decode(self, q, k, v, pos, module=None, **options):
        self._put(k, v, pos)
        options.pop("columns")  # 0: whoever wants what a row pays has a chooser
        k, v, _ = self._tail()
        none = torch.zeros_like(self.seen)
        out, lse = _ops.attend(q, self.k, self.v, self.offset, self.front, k, v, none, **options)
        return out, lse, None

    def batch_select_indices(self, indices) -> None:
        self.own()
        self.batch_select_indices(indices)

    def segments(self):
        if self.appended:
            self.own()
        return EvictionLayer.segments(self)

    def positions(self) -> list:
        if not self.appended:
            return EvictionLayer.positions(self)
        offsets, fronts, (_, _, tail) = self.offset.tolist(), self.front.tolist(), self._tail()
        return [
            [torch.cat([self.pos[start : start + n], own]) for start, n in zip(*row, strict=True)]
            for *row, own in zip(offsets, fronts, tail, strict=True)
        ]

    def allocated_bytes(self) -> int:
        """What is shared counts too."""
        tail = sum(t.numel() * t.element_size() for t in (self.tail_k, self.tail_v, self.tail_pos))
        return EvictionLayer.allocated_bytes(self) + tail

    def own(self) -> None:
        source, (k, v, pos), counts = self._stored(), self._tail(), self.counts
        self._allocate(self._grown(counts))
        self._move(source, None, counts, k, v, pos, 0 * self.seen)

    def _stored(self):
        return self.k, self.v, self.pos, self.offset, self.front

    def _tail(self):
        """Keys, values [B, Hkv, n, D] and positions [B, n] of the tail."""
        n = self.appended
        return self.tail_k[:, :, :n], self.tail_v[:, :, :n], self.tail_pos[:, :n].contiguous()

    def _put(self, k, v, pos) -> None:
        """Store new columns in the tail."""
        start, end = self.appended, self.appended + k.shape[2]
        if end > self.tail_k.shape[2]:
            more = end + max(end // 8, ROOM) - start
            with torch.inference_mode(False):
                self.tail_k, self.tail_v, self.tail_pos = (
                    torch.cat([own, own.new_empty(*own.shape[:at], more, *own.shape[at + 1 :])], at)
                    for own, at in zip(self._tail(), (2, 2, 1), strict=True)
                )
        self.tail_k[:, :, start:end], self.tail_v[:, :, start:end], self.tail_pos[:, start:end] = k, v, pos
        self.appended, added = end, end - start
        self.len, self.counts = self.len + added, self.counts + added

    def _allocate(self, capacity) -> None:
        EvictionLayer._allocate(self, capacity)
        del self.front, self.appended, self.tail_k, self.tail_v, self.tail_pos
        self.__class__ = EvictionLayer  # type: ignore[assignment]  # which it is from here on
