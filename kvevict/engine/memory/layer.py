"""The cache layer that slots are evicted from: Transformers' layer interface over a `Storage` of the kept slots."""

from __future__ import annotations

import copy
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ...context import current
from ...ops import _ops
from ...policy import kv
from .carried import of_layer
from .pool import SlotPool
from .ranks import Ranks
from .sequence import Sequence
from .storage import ROOM, Decoded, Storage
from .stored import Later

HALF_READ = "past_key_values was left half read by an error; read the prompt into a new one"


def fit(*tensors: Tensor) -> list[Tensor]:
    """Pad tensors [..., D], whose D may differ, with zeros to one common width, a multiple of 8 as the ops require."""
    width = -(-max([t.shape[-1] for t in tensors]) // 8) * 8
    return [t if t.shape[-1] == width else torch.nn.functional.pad(t, (0, width - t.shape[-1])) for t in tensors]


def _stored(name: str) -> Any:
    return property(attrgetter(f"storage.{name}"))


def _of_the_cache(layer: object, *args: object) -> None:
    raise ValueError("a layer has no rows or tokens of its own: crop, reorder or select its EvictionCache")


class EvictionLayer(CacheLayerMixin):
    """The cache of one layer. Its slots are in `storage`, `len` [B, Hkv] of them per head; `counts` is `len` on the
    host. The cache's `sequence` counts the tokens read."""

    is_compileable = False
    is_sliding = False
    is_croppable = True
    decodes_after_prefix = True  # `decode` can attend to slots of a prefix, which lie in other buffers

    k, v, pos, offset, centre = _stored("k"), _stored("v"), _stored("pos"), _stored("offset"), _stored("centre")
    len, counts, longest = _stored("total_len"), _stored("total_counts"), _stored("longest")
    segments, positions = _stored("segments"), _stored("positions")
    live_bytes, padded_bytes = _stored("live_bytes"), _stored("padded_bytes")
    # Copies of the slots [B, Hkv, longest, D], with zeros after a shorter head's slots; None before the first tokens
    keys = property(lambda self: self.storage.dense("k") if self.is_initialized else None)
    values = property(lambda self: self.storage.dense("v") if self.is_initialized else None)

    pool: SlotPool | None = None  # lends the buffers of the slots; None: the layer has its own buffers

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence  # counts the tokens that the cache has read
        self.is_initialized = False
        self.storage = Storage()
        self.pending_kv: tuple[Tensor, Tensor] | None = None  # new keys and values, until the layer attends
        self.carry: Tensor | None = None  # fp32 [B, Hkv, C] scores that slots carry from cut to cut (carried.py)
        # Quantity's name -> tensor [B, ..] that its `accumulate` returned; the tensor is replaced, never written to
        self.memory: dict[str, Tensor] = {}
        self.decode_queries: Tensor | None = None  # [B, H, n, W] query rows of the last n decoded tokens
        # Attributes in the host's memory:
        self.budget: np.ndarray | None = None  # [B] budget of the last read, in slots over all kv heads
        # [B, heads of all ranks] number of a head's first slots that belong to the prompt; None: all, or unknown
        self.prompt: np.ndarray | None = None
        # [B, heads of all ranks] slot count of a head minus that of this rank's first head; None: 0 for every head
        self.head_offsets: np.ndarray | None = None
        self.expected = 0  # number of slots per head that the running read is going to store
        self.kinds: kv.Kinds | None = None  # how keys and values are packed; None: no patched call has attended yet

    def reset(self) -> None:
        EvictionLayer.__init__(self, self.sequence)

    def fork(self, storage: Storage | None = None) -> EvictionLayer:
        """Return an independent layer that shares the stored slots; or, given a `storage`, a layer that has its slots
        instead."""
        twin = copy.copy(self)
        if storage is not None:
            twin.hold(storage)
        elif self.is_initialized:
            twin.storage = self.shared()
        return twin

    # -- called by Transformers -------------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.storage = Storage.empty(key_states, self.pool)
        if self.sequence.seen is None:
            self.sequence.seen = np.zeros(len(key_states), np.int64)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Hold new keys and values [B, Hkv, S, D] until the layer attends; the patched attention function then stores
        the new slots that survive eviction."""
        if current() is None:
            raise RuntimeError(
                "this cache was filled by a model patched with kvevict: call kvevict.patch(model, ...) before using "
                "it, and model.eval() after training"
            )
        if not self.is_initialized:
            self.lazy_initialization(self.pack(key_states[:, :, :0], value_states[:, :, :0])[0])
        self.pending_kv = key_states, value_states
        return self.pending_kv

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, self.sequence.columns

    def get_seq_length(self) -> int:
        """Return the number of tokens read, not of slots kept, since the next token's position depends on it."""
        return self.sequence.columns

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length

    def offload(self) -> None:
        raise NotImplementedError("kvevict's cache is small by design and cannot be offloaded; drop offloading=True")

    prefetch = offload
    reorder_cache = batch_select_indices = batch_repeat_interleave = _of_the_cache  # type: ignore[assignment]

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the slots of the tokens that a running `EvictionCache.crop` removes. Raises ValueError if the layer is
        cropped by itself."""
        if self.sequence.removing is None:
            _of_the_cache(self)
        if self.sequence.removing:
            self.drop_last(self.sequence.removing)

    # -- called by the cache, which changes slots by these methods alone --------------------------------------------

    def hold(self, storage: Storage, head_offsets: np.ndarray | None = None) -> None:
        """Attend to the slots in `storage` from now on. head_offsets: as the attribute."""
        self.storage, self.head_offsets = storage, head_offsets

    def shared(self) -> Storage:
        """Return a fork of the slots, which become a prefix that the layer shares with the fork."""
        self.storage = self.storage.as_prefix()
        return self.storage.forked()

    def gather(self) -> None:
        """Copy a fork's slots, which lie in several buffers, into one; of a far storage, to the layer's device."""
        self.storage = self.storage.whole()

    def make_room(self, room: int = ROOM) -> None:
        """Make room for one more slot in every head, and for `room` slots if buffers have to grow."""
        self.storage = self.storage.with_room(self.expected, room)

    def drop_last(self, count: int) -> None:
        """Remove the last `count` slots of every head."""
        if not self.is_initialized:
            return
        self.storage = self.storage.crop(count)
        if self.decode_queries is not None:
            left = self.decode_queries[:, :, : max(0, self.decode_queries.shape[2] - count)]
            self.decode_queries = left if left.shape[2] else None
        self.carry = of_layer(self.carry, self)
        if self.prompt is not None:  # every head loses equally many slots
            held = self.counts if self.head_offsets is None else self.counts[:, :1] + self.head_offsets
            self.prompt = np.minimum(self.prompt, held if held.shape == self.prompt.shape else held[:, :1])

    def select(self, rows: list[int]) -> None:
        """Keep the batch rows `rows`, in this order; a batch row may occur twice."""
        if not self.is_initialized:
            return
        at = torch.tensor(rows, dtype=torch.int64, device=self.device)
        for name in ("carry", "decode_queries", "budget", "prompt", "head_offsets"):
            value = getattr(self, name)
            setattr(self, name, None if value is None else value[at if isinstance(value, Tensor) else rows])
        self.memory = {name: value[at] for name, value in self.memory.items()}
        self.storage = self.storage.rows(rows)
        self.carry = of_layer(self.carry, self)

    # -- called by eviction -----------------------------------------------------------------------------------------

    pack = staticmethod(fit)  # new keys and values [B, Hkv, S, D] -> the rows to store [B, Hkv, S, W]

    def take(self, module: torch.nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, ...] | None:
        """Return the tensors to store in place of the keys and values that `module` attends with; None: store the keys
        and values themselves."""
        pending, self.pending_kv = self.pending_kv, None
        if pending is None or pending[0] is not key or pending[1] is not value:
            raise RuntimeError(
                f"{type(module).__name__} changed keys or values after the cache update; kvevict cannot evict from it"
            )
        return None

    def held(self, module: torch.nn.Module) -> Storage | Later:
        """Return the keys and values of every head's slots, in one set of buffers as the ops read them."""
        return self.storage.gathered()

    is_represented = property(lambda self: self.kinds is not None and self.storage.is_centred)

    @torch.no_grad()
    def represent(
        self, kind: str, query: Tensor, key: Tensor, value: Tensor, first: Tensor, options: dict, ranks: Ranks
    ) -> None:
        """Prepare how slots are packed, before a patched call attends: choose once in how many bits keys and values are
        stored (`kinds`), and set the centre of a batch row's keys when its first tokens are read. If slots are stored
        already, they are packed, too, and `kinds` is chosen by the stored keys instead of the new ones.

        kind         the name in `kv.KINDS` that the run asks for
        query        query rows [B, H, T, D] of the call's last T columns
        key, value   [B, Hkv, S, D] of its last S columns, of which batch row b has those from first[b] on
        options      scale, softcap and sinks of attention
        """
        is_first = self.kinds is None
        if self.kinds is None:
            self.kinds = kv.KINDS[kind]
        if self.kinds[0] == kv.MODEL:
            return
        kinds, centre, known = self.packing(kind if is_first else None, query, key, value, first, options, ranks)
        if kinds is None:
            self.storage = self.storage.centred_at(centre, known)
        else:
            self.kinds, self.storage = kinds, self.storage.gathered().repacked(kinds, centre, known)

    def packing(
        self, kind: str | None, query: Tensor, key: Tensor, value: Tensor, first: Tensor, options: dict, ranks: Ranks
    ) -> tuple[kv.Kinds | None, Tensor, np.ndarray]:
        """Return (formats `kinds` of keys and values, None if `kind` is None; key centres fp32 [B, Hkv, D]; bool [B]
        batch rows whose centre is known). The arguments are those of `represent`."""

        def seen(x: Tensor) -> Tensor:
            return torch.arange(key.shape[2] - x.shape[2], key.shape[2], device=x.device) >= first[:, None, None]

        keys, values, held, weights = key, value, seen(key), self._attention(query, key, first, options)
        if kind is not None and self.counts.any():
            keys, values = self.storage.dense("k"), self.storage.dense("v")
            held = torch.arange(keys.shape[2], device=keys.device) < self.len[..., None]
            weights = weights[:, :, : keys.shape[2]]
        else:  # nothing is stored yet, so slot i of batch row b is column first[b] + i
            at = (torch.arange(keys.shape[2], device=keys.device) - first[:, None]).clamp_min(0)
            weights = weights.gather(2, at[:, None].expand(-1, keys.shape[1], -1))
        centre, known = kv.centre(keys, weights * held), held.any(2).any(1).cpu().numpy()
        if kind is None:
            return None, centre, known

        def error(of_keys: int) -> float:
            errors = kv.expected_errors(query, seen(query), keys, held, centre, options["scale"], of_keys)
            return float(ranks.gather(errors[None]).mean())

        norms = [kv.norms(x).masked_fill(~held, 0).amax() for x in (keys - centre[:, :, None], values)]
        return kv.chosen(kind, error, ranks.gather(torch.stack(norms)[None, None]).amax((0, 1)).tolist()), centre, known

    def _attention(self, query: Tensor, key: Tensor, first: Tensor, options: dict) -> Tensor:
        """Sum the attention weights that each slot of [stored | new] gets from the last `kv.ROWS` rows of query [B, H,
        T, D]: fp32 [B, Hkv, C], mean over a GQA group. The new slots are key [B, Hkv, S, D] from column first[b] on."""
        rows, columns = query[:, :, -kv.ROWS :], key.shape[2]
        skip, stop = (first - (columns - rows.shape[2])).clamp_min(0), torch.full_like(first, columns)
        return _ops.score(
            rows, skip, self.storage.gathered(), key, first, stop, causal=True, reduce="sum",
            columns=self.longest() + columns, **options,
        )  # fmt: skip

    def append(self, k: Tensor, v: Tensor, pos: Tensor, first: Tensor, padding: np.ndarray) -> None:
        self.storage = self.storage.append(k, v, pos, first, padding, self.expected)

    def keep(self, index: Tensor, keep: np.ndarray, *new: Tensor) -> None:
        self.storage = self.storage.keep(index, keep, *new, computed=self.kinds == kv.KINDS["model"])
        self.sequence.fix()
        self.expected, self.prompt = 0, None

    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, module: torch.nn.Module | None = None, **options: Any
    ) -> Decoded:
        """Store a decoded token's row in the newest slot, which `tick` has counted, and attend to all slots."""
        return self.storage.decode(q, k, v, pos, **options)

    def tick(self) -> None:
        """Count one more slot in every head, which the next `decode` writes."""
        self.make_room()
        self.storage.tick()

    def remember(self, row: Tensor, most: int) -> None:
        """Remember a decoded token's query row [B, H, 1, W], and earlier rows up to `most` in all, as observing rows
        for later cuts."""
        before = self.decode_queries
        if before is not None and before.shape[3] == row.shape[3]:  # else another policy's rows: drop them
            row = torch.cat([before, row], 2)
        self.decode_queries = row[:, :, -most:]
