"""The slots of one layer: a flat, ragged store that knows how many tokens it has seen and how many it keeps."""

import copy

import numpy as np
import torch
from transformers.cache_utils import CacheLayerMixin

from .. import _ops, compat
from . import host
from .context import current

HALF_READ = "past_key_values was left half read by an error; read the prompt into a new one"
ROOM = 64  # free rows per head after an eviction, so that decoding appends without moving anything


class EvictionLayer(CacheLayerMixin):
    """Keys and values of the slots a layer kept, for every batch row and kv head a number of its own.

    Head h of row b owns rows offset[b,h] .. offset[b,h] + len[b,h] - 1 of the flat buffers `k`, `v` [rows, D] and `pos`
    [rows], in ascending position, and has room up to `capacity[b,h]`. Two lengths are never confused: `columns` (and
    `seen`, without padding) count tokens read, `len` counts slots stored (and `counts`, the same on the host).
    """

    is_compileable = False
    is_sliding = False
    is_croppable = True
    k: torch.Tensor
    v: torch.Tensor
    pos: torch.Tensor
    offset: torch.Tensor
    len: torch.Tensor
    seen: torch.Tensor
    capacity: np.ndarray
    counts: np.ndarray

    def __init__(self, *args, **kwargs):
        self.reset()

    def reset(self) -> None:
        """Forget everything, as if new."""
        self.is_initialized = False
        self.half_read = False  # in a cache's first such layer: a call that changes the cache has not ended
        self.packed = ()  # in a cache's first such layer: (start, stop) columns whose padding was moved to the left
        self.upcoming = None  # there too, where it was: [B] int64 positions that come next
        self.record_past = False
        self.fresh = None  # (k, v) between update() and the attention function
        self.k = self.v = self.pos = None  # type: ignore[assignment]  # until the first tokens, and what follows
        self.offset = self.len = None  # type: ignore[assignment]  # [B, Hkv] int64, int32
        self.capacity = self.counts = None  # type: ignore[assignment]  # [B, Hkv] on the host
        self.columns = 0  # tokens read, padding included: what Transformers calls the sequence length
        self.seen = None  # type: ignore[assignment]  # [B] int32 tokens read without padding
        self.carry = None  # [B, Hkv, C] fp32 scores that stay with their slots
        self.recent = None  # [B, H, <= rows, D] last decoded queries
        self.budget = None  # [B] slots over all heads, of the last read; on the host
        self.policy = None  # that gave the budget
        self.rerotate = None  # a loaded layer's, which has no policy: whether that which read it rerotates
        self.ahead = None  # [B, heads of all ranks] slots that each holds more than the first here; None: as many
        self.tail = 0  # columns appended since the last eviction: what crop can take back
        self.room = 0  # free rows of the fullest head
        self.expected = 0  # slots that a read is going to append
        self.shared = False  # a fork reads the storage, so what is stored there stays where it is

    def fork(self):
        """A layer that goes on from here by itself and reads what is stored where it lies."""
        from .fork import ForkedLayer

        return ForkedLayer.of(self) if self.is_initialized else copy.copy(self)

    # -- what Transformers calls ------------------------------------------------------------------------------------

    def lazy_initialization(self, key_states, value_states=None) -> None:
        batch, heads, _, dim = key_states.shape
        self.dtype, self.device = key_states.dtype, key_states.device
        counts = dict(dtype=torch.int32, device=self.device)
        self.len = torch.zeros(batch, heads, **counts)
        self.counts = self.capacity = np.zeros((batch, heads), np.int64)
        self.offset = torch.zeros(batch, heads, dtype=torch.int64, device=self.device)
        self.seen = torch.zeros(batch, **counts)
        self.k = torch.empty(0, dim, dtype=self.dtype, device=self.device)
        self.v = torch.empty(0, dim, dtype=self.dtype, device=self.device)
        self.pos = torch.empty(0, **counts)
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        """Take note of the new keys and values [B, Hkv, S, D] and hand them back: attention reads the stored slots
        itself, and stores what is kept."""
        step = current()
        if step is None:
            raise RuntimeError(
                "this cache was filled by a model patched with kvevict; call kvevict.patch(model, ...) before using it"
            )
        if not self.is_initialized:
            self.lazy_initialization(self.pack(key_states[:, :, :0], value_states[:, :, :0])[0])
        if self.shared and step.patch.policy.rerotate:  # which turns stored keys, and back
            self.own()
        self.fresh = key_states, value_states
        return self.fresh

    def take(self, module, key, value):
        """What is to be stored of the keys and values that `module` attends with, after the update; None: these."""
        fresh, self.fresh = self.fresh, None
        if fresh is None or fresh[0] is not key or fresh[1] is not value:
            raise RuntimeError(
                f"{type(module).__name__} changed keys or values after the cache update; kvevict cannot evict from it"
            )

    def pack(self, key, value):
        """New keys and values [B, Hkv, S, D] as they are stored."""
        return fit(key, value)

    def slots(self, module):
        """What holds `k`, `v`, `pos`, `offset`, `len` and `counts` of every head's slots, for the ops."""
        return self

    def get_mask_sizes(self, query_length) -> tuple[int, int]:
        return query_length, self.columns

    def get_seq_length(self) -> int:
        """Tokens seen, never slots kept: the next token's position depends on it."""
        return self.columns

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length

    def activate_past_recording(self) -> None:
        """Keep every new slot until `crop` (assisted decoding rolls back what it rejects)."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last -tokens_to_remove tokens. Only tokens read since the last eviction can be taken back."""
        if tokens_to_remove > 0:
            if not compat.CROP_TAKES_LENGTH:
                raise ValueError(
                    f"crop({tokens_to_remove}): give a negative number, minus the number of tokens to remove"
                )
            tokens_to_remove = min(0, tokens_to_remove - self.columns)
        count = -tokens_to_remove
        if count == 0 or not self.is_initialized:
            return
        if count > self.tail:
            raise ValueError(
                f"crop cannot remove {count} tokens: only the last {self.tail} were read since slots were evicted; "
                "read the prompt again instead"
            )
        self.own()  # what comes next overwrites what is cropped
        self.len, self.counts = (self.len - count).clamp_min(0), np.maximum(self.counts - count, 0)
        self.seen = (self.seen - count).clamp_min(0)
        self.columns -= count
        self.tail -= count
        self.upcoming = None if self.upcoming is None else self.upcoming - count
        self.room = self._least_room()
        if self.recent is not None:
            left = self.recent[:, :, : max(0, self.recent.shape[2] - count)]
            self.recent = left if left.shape[2] else None
        if self.carry is not None:
            self.carry = self._blank_past_end(self.carry[..., : self.longest()])

    def reorder_cache(self, beam_idx) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            rows = torch.arange(self.len.shape[0], device=self.device)
            self.batch_select_indices(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices) -> None:
        """Keep the batch rows `indices` (any order, repeats allowed, or a boolean mask)."""
        if not self.is_initialized:
            return
        rows = torch.arange(self.len.shape[0], device=self.device)
        chosen = rows[torch.as_tensor(indices, device=self.device)]
        if torch.equal(chosen, rows):
            return
        source = self.k, self.v, self.pos, self.offset[chosen], self.len[chosen]
        on_host = chosen.tolist()
        for name in ("seen", "carry", "recent", "upcoming"):
            value = getattr(self, name)
            setattr(self, name, None if value is None else value[chosen])
        self.counts, self.budget = self.counts[on_host], None if self.budget is None else self.budget[on_host]
        self.ahead = None if self.ahead is None else self.ahead[on_host]
        if self.carry is not None:
            self.carry = self.carry[..., : self.longest()]
        self._allocate(self.capacity[on_host])
        self._move(source, None, self.counts)

    def offload(self):
        raise NotImplementedError("kvevict's cache is small by design and cannot be offloaded; drop offloading=True")

    prefetch = offload

    @property
    def keys(self):
        """Dense copy [B, Hkv, longest, D] of the stored keys, zeros behind shorter heads."""
        return self._dense(self.k)

    @property
    def values(self):
        """Dense copy [B, Hkv, longest, D] of the stored values, zeros behind shorter heads."""
        return self._dense(self.v)

    # -- what eviction calls ----------------------------------------------------------------------------------------

    def longest(self) -> int:
        """Slots of the fullest head."""
        return int(self.counts.max()) if self.counts.size else 0

    def live_bytes(self) -> int:
        """Bytes of the stored keys and values: 2 * bytes * d * sum(len)."""
        return 2 * self.k.element_size() * self.k.shape[1] * int(self.counts.sum()) if self.is_initialized else 0

    def padded_bytes(self) -> int:
        """What `live_bytes` would be if every head were padded to the fullest."""
        return 2 * self.k.element_size() * self.k.shape[1] * self.len.numel() * self.longest()

    def allocated_bytes(self) -> int:
        """Bytes of all that the layer holds."""
        tensors = (self.k, self.v, self.pos, self.offset, self.len, self.carry, self.recent)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)

    def expect(self, slots: int) -> None:
        """The next growth makes room for `slots` slots in every head, so that appending up to there moves nothing."""
        self.expected = slots

    def append(self, k, v, pos, first, padding) -> None:
        """Store new columns first[b].. of k, v [B, Hkv, S, D], pos [B, S] behind each head's slots; amortised O(S).
        padding is `first` on the host."""
        counts = self.counts + (k.shape[2] - padding)[:, None]
        source = self._stored()
        if (counts > self.capacity).any():
            self._allocate(self._grown(counts))
        self._move(source, None, counts, k, v, pos, first)

    def keep(self, index, keep, k=None, v=None, pos=None, first=None) -> None:
        """Keep slots index [B, Hkv, K] (ascending, keep[b,h] of them, on the host) of [stored | new]."""
        source = self._stored()
        wanted = keep + ROOM
        if self.shared or (wanted > self.capacity).any() or self.capacity.sum() > 2 * wanted.sum():
            self._allocate(wanted)
        self._move(source, index, keep, k, v, pos, first)
        self.tail = self.expected = 0

    def decode(self, q, k, v, pos, module=None, **options):
        """Append one row and attend over all slots: (out, lse, probs) as `_ops.decode`."""
        if self.room == 0:
            source = self._stored()
            self._allocate(self._grown(self.counts))
            self._move(source, None, self.counts)
        result = _ops.decode(q, k, v, pos, self.k, self.v, self.pos, self.offset, self.len, **options)
        self.len, self.counts = self.len + 1, self.counts + 1
        self.room -= 1
        return result

    def advance(self, columns: int, tokens) -> None:
        """Count `columns` more columns read, of which tokens [B] (or a number) are no padding."""
        least, most = int(np.min(tokens)), int(np.max(tokens))
        self.columns += columns
        self.tail = self.tail + columns if least == columns else least  # padding ends what crop can take back
        self.seen = self.seen + (most if least == most else host.upload(tokens, self.device, torch.int32))

    def own(self) -> None:
        """Copy what is stored if forks read it, so that it may be moved and overwritten."""
        if self.shared:
            source = self._stored()
            self._allocate(self.capacity)
            self._move(source, None, self.counts)

    def _stored(self):
        """The buffers and counts as `_move` reads them, taken before `_allocate` replaces them."""
        return self.k, self.v, self.pos, self.offset, self.len

    def _grown(self, n):
        """Capacity [B, Hkv] for n slots and an eighth more, so that appending is O(1) on average."""
        return np.maximum(self.capacity, np.maximum(n + np.maximum(n // 8, ROOM), self.expected))

    def _allocate(self, capacity) -> None:
        self.capacity, rows, self.shared = capacity, int(capacity.sum()), False
        self.offset = host.upload(self._offsets(), self.device)
        with torch.inference_mode(False):  # a cache filled in inference mode can be written to outside of it
            self.k, self.v, self.pos = (t.new_empty(rows, *t.shape[1:]) for t in (self.k, self.v, self.pos))

    def _offsets(self):
        """`offset` on the host: heads lie one behind the other."""
        return (self.capacity.cumsum() - self.capacity.ravel()).reshape(self.capacity.shape)

    def _move(self, source, index, keep, k=None, v=None, pos=None, first=None) -> None:
        if k is None:
            batch, heads = keep.shape
            k = v = self.k.new_empty(batch, heads, 0, self.k.shape[1])
            pos, first = self.pos.new_empty(batch, 0), self.pos.new_zeros(batch)
        self.counts, self.len = keep, host.upload(keep, self.device, torch.int32)
        here = self.k, self.v, self.pos, self.offset
        _ops.compact(*source, k, v, pos, first, index, self.len, *here)  # type: ignore[call-arg]
        self.room = self._least_room()

    def _least_room(self) -> int:
        return int((self.capacity - self.counts).min()) if self.counts.size else 0

    def _blank_past_end(self, scores):
        column = torch.arange(scores.shape[-1], device=scores.device)
        return scores.masked_fill(column >= self.len[..., None], 0)

    def segments(self):
        """(b, h, slice of the flat buffers) of every head's slots."""
        offsets, lens = self._offsets().tolist(), self.counts.tolist()
        for b, row in enumerate(offsets):
            for h, start in enumerate(row):
                yield b, h, slice(start, start + lens[b][h])

    def positions(self) -> list:
        """Positions of the slots by row and head: int32 tensors of their own."""
        heads = [[None] * self.len.shape[1] for _ in range(self.len.shape[0])]
        for b, h, rows in self.segments():
            heads[b][h] = self.pos[rows].clone()
        return heads

    def places(self, shared: bool):
        """`positions` as numbers; None where heads that ought to be alike are not."""
        heads = [[head.tolist() for head in row] for row in self.positions()]
        return None if shared and any(head != row[0] for row in heads for head in row) else heads

    def _dense(self, flat):
        if not self.is_initialized:
            return None
        dense = flat.new_zeros(*self.len.shape, self.longest(), flat.shape[1])
        for b, h, rows in self.segments():
            dense[b, h, : rows.stop - rows.start] = flat[rows]
        return dense


def fit(*tensors):
    """Tensors [..., D], each with a D of its own, with zeros up to one width that the ops take."""
    width = -(-max(t.shape[-1] for t in tensors) // 8) * 8
    return [t if t.shape[-1] == width else torch.nn.functional.pad(t, (0, width - t.shape[-1])) for t in tensors]
