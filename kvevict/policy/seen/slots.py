"""The alive slots of one layer before some are evicted, and the kv heads that hold them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from ...ops import _ops

REDUCE: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "sum": torch.sum, "mean": torch.mean, "max": torch.amax,
}  # fmt: skip


class Bounds(NamedTuple):
    """Positions at which slots are not chosen by score alone."""

    kept: Any = None  # int32 [B, 2] positions (start, stop) whose slots are always kept; None: no positions
    # int32 [B, 2] (position, n): from that position on, a head keeps n slots, and more only if it has no other slots
    # left to keep; None: no limit
    limited: Any = None


FREE = Bounds()  # at all positions slots are chosen by score alone


@dataclass(frozen=True, eq=False)
class Heads:
    """The kv heads of a layer whose slots are chosen on this rank: all heads, or this rank's part of them (tensor
    parallel). Latents (MLA) are shared by all heads and count as one head."""

    ranks: Any  # kvevict.engine.memory.ranks.Ranks
    count: int

    def numbers(self, device: torch.device) -> torch.Tensor:
        """Return the indices of this rank's heads among all kv heads of the layer: int64 [Hkv]."""
        return self.ranks.rank * self.count + torch.arange(self.count, device=device)

    def gather(self, x: torch.Tensor, columns: int | None = None) -> torch.Tensor:
        """Join x [B, Hkv, ..] of all ranks along the heads. columns: size to which x [B, Hkv, C] is padded with 0
        before."""
        return self.ranks.gather(x, columns)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum x over all ranks."""
        return self.ranks.sum(x)

    def reduce(self, x: torch.Tensor, how: str) -> torch.Tensor:
        """Reduce x [B, H, C] over the query heads of each group: [B, Hkv, C]. how: "sum", "mean" or "max"; "none"
        returns x."""
        return x if how == "none" else REDUCE[how](x.unflatten(1, (self.count, -1)), 2)

    def merge(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [B, heads, C] for the heads that choose slots: of latents, the mean over the heads that share them
        ([B, 1, C]); else x."""
        return x if x.shape[1] == self.count else x.mean(1, keepdim=True)


@dataclass(frozen=True, eq=False)
class KV:
    """Keys and values of the stored slots and of the new columns, as the ops take them; of latents, those that each
    head computes from them."""

    stored: Any  # the stored slots: `k`, `v` [N, D], `pos` [N]; first row `offset` and number of rows `len` [B, heads]
    k: torch.Tensor  # new keys [B, heads, S, D]
    v: torch.Tensor  # new values [B, heads, S, D]
    first: torch.Tensor  # [B] int32 number of columns of left padding
    options: dict[str, Any]  # scale, softcap and sinks of the attention

    end = property(lambda self: self.k.shape[2] + 0 * self.first)  # [B] number of new columns

    def within(self, begin: torch.Tensor, count: torch.Tensor) -> "KV":
        """Return a copy with only stored slots begin .. begin + count - 1 of each head; begin, count: [B, heads]."""
        return replace(self, stored=self.stored.within(begin, count.contiguous()))


@dataclass(frozen=True, eq=False)
class Slots:
    """The alive slots of one layer. Head h of batch row b has n[b, h] slots: the stored slots, then the new slots
    without padding. The largest n is C, `columns`."""

    index: int  # the decoder layer's number
    heads: Heads
    all_counts: np.ndarray  # [B, heads of all ranks] number of slots of each head, on the host
    protected: tuple[torch.Tensor, torch.Tensor]  # int32 [B] each: how many first and last slots are always kept
    pos: Any = None  # int32 [B, S] positions of the new columns
    stored: Any = None  # the heads' stored slots: `pos` [N], `offset`, `len` [B, Hkv], and `counts` (`len` on the host)
    kv: Any = None  # the `KV`; None for the slots of all ranks, as no rank holds all keys and values
    prompt: np.ndarray | None = None  # [B, heads of all ranks] number of first slots that keep_prompt=True keeps
    bounds: Bounds = FREE  # further positions at which slots are always kept, or limited in number

    device = property(lambda self: self.protected[0].device)

    @cached_property
    def n(self) -> torch.Tensor:
        """The number of slots of each head, int32 [B, Hkv]."""
        return self.stored.len + (self.kv.k.shape[2] - self.kv.first)[:, None]

    @cached_property
    def counts(self) -> np.ndarray:
        """The number of slots of each head, `n`, on the host: int [B, Hkv]."""
        return self.heads.ranks.mine(self.all_counts)

    @cached_property
    def columns(self) -> int:
        return int(self.counts.max()) if self.counts.size else 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape [B, Hkv, C] of a tensor with one number for each slot."""
        return *self.counts.shape, self.columns

    @cached_property
    def padding(self) -> np.ndarray:
        """The number of columns of left padding (`kv.first`) on the host: int [B]. Read `padding` and `n` before the
        slots are cut: both are computed at the first use."""
        return self.kv.k.shape[2] - (self.counts - self.stored.counts)[:, 0]

    @cached_property
    def past(self) -> torch.Tensor:
        """The number of the prompt's slots that each head keeps besides its budget, int32 [B, Hkv]; 0 unless
        keep_prompt=True."""
        if self.prompt is None:
            return torch.zeros_like(self.n)
        return _ops.upload(self.heads.ranks.mine(self.prompt), self.device, torch.int32)

    @cached_property
    def first(self) -> torch.Tensor:
        """The number of protected first slots of each head, int32 [B, Hkv]."""
        return torch.maximum(self.protected[0][:, None], self.past)

    @cached_property
    def alive(self) -> np.ndarray:
        """The number of slots of all heads on all ranks together, on the host: int [B]."""
        return self.all_counts.sum(1)

    @cached_property
    def least(self) -> torch.Tensor:
        """The number of protected slots of each head, int32 [B, Hkv]."""
        ends = torch.minimum(self.n, self.first + self.protected[1][:, None])
        return ends if self.bounds.kept is None else ends + self.between.sum(-1, dtype=torch.int32)

    @cached_property
    def competing(self) -> torch.Tensor:
        """Whether a slot exists and is not protected, bool [B, Hkv, C]."""
        return self._inner if self.bounds.kept is None else self._inner & ~self.between

    @cached_property
    def between(self) -> torch.Tensor:
        """Whether `bounds` always keep a slot, and it is not one of the protected first and last slots: bool
        [B, Hkv, C]."""
        return self.at(self.bounds.kept) & self._inner

    def at(self, span: torch.Tensor) -> torch.Tensor:
        """Return whether each slot's position is within span [B, 2] (start, stop): bool [B, Hkv, C]."""
        start, stop = self.around(span)
        column = torch.arange(self.columns, device=self.device)
        return (column >= start[..., None]) & (column < stop[..., None])

    def around(self, span: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the indices (start, stop) of the slots whose positions are within span [B, 2] (start, stop): int32
        [B, Hkv] each."""
        if span not in self._around:
            start, stop = self.below(span).unbind()
            self._around[span] = start, stop
        return self._around[span]

    @cached_property
    def _around(self) -> dict[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Cached results of `around`, by span."""
        return {}

    def of_head(self, x: torch.Tensor, b: int, h: int) -> torch.Tensor:
        """Return the elements of x [B, Hkv, C] for the alive slots of kv head h in batch row b. Latents have one head,
        which stands for every h."""
        h = min(h, self.n.shape[1] - 1)
        return x[b, h, : self.counts[b, h]]

    def below(self, limits: torch.Tensor) -> torch.Tensor:
        """Count each head's slots with positions below each of the limits [B, n]: int32 [n, B, Hkv]."""
        at = self.positions
        return ((at >= 0) & (at < limits.T[..., None, None])).sum(-1, dtype=torch.int32)

    def beyond(self, ranks: torch.Tensor) -> torch.Tensor:
        """Mark the unprotected slots that exceed the number in `bounds.limited`: bool [B, Hkv, C]. Towards this number
        protected slots count first, then the slots with the largest `ranks` [B, Hkv, C]."""
        start, most = self.bounds.limited[:, :, None, None].unbind(1)
        limited = self.positions >= start
        inside = limited & self.competing
        best = ranks.masked_fill(~inside, -torch.inf).argsort(dim=-1, descending=True, stable=True)
        return inside & (best.argsort(dim=-1) >= most - (limited & ~inside).sum(-1, keepdim=True))

    @cached_property
    def _inner(self) -> torch.Tensor:
        """Whether a slot exists and is not one of the protected first and last slots, bool [B, Hkv, C]."""
        column = torch.arange(self.columns, device=self.device)
        return (column >= self.first[..., None]) & (column < (self.n - self.protected[1][:, None])[..., None])

    @cached_property
    def positions(self) -> torch.Tensor:
        """The positions of each head's alive slots, ascending, then -1 up to C: int32 [B, Hkv, C]."""
        stored, first = self.stored, self.kv.first
        column = torch.arange(self.columns, device=self.device)
        table = torch.cat([stored.pos, self.pos.flatten(), stored.pos.new_full((1,), -1)])
        row = torch.arange(self.n.shape[0], device=self.device)[:, None, None]
        new = len(stored.pos) + row * self.pos.shape[1] + first[:, None, None] + column - stored.len[..., None]
        place = torch.where(column < stored.len[..., None], stored.offset[..., None] + column, new)
        return table[place.masked_fill(column >= self.n[..., None], -1)]

    def all_ranks(self, shared: bool) -> "Slots":
        """Return the slots of the heads on all ranks, for parts of a policy that compare heads. shared: True if all
        heads hold the same slots."""
        if self.heads.ranks.size == 1:
            return self
        return _AllRanks(
            self.index, self.heads, self.all_counts, self.protected, prompt=self.prompt, bounds=self.bounds, own=self,
            shared=shared,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _AllRanks(Slots):
    """The slots of the heads on all ranks. Positions are gathered from the ranks at their first use, since a split into
    equal budgets never needs them."""

    own: Any = None  # the slots of this rank's heads
    shared: bool = False

    counts = property(lambda self: self.all_counts)

    @cached_property
    def n(self) -> torch.Tensor:
        return _ops.upload(self.all_counts, self.device, torch.int32)

    @cached_property
    def past(self) -> torch.Tensor:
        return torch.zeros_like(self.n) if self.prompt is None else _ops.upload(self.prompt, self.device, torch.int32)

    @cached_property
    def positions(self) -> torch.Tensor:
        heads = self.all_counts.shape[1]
        if self.shared:
            return self.own.positions[:, :1].expand(-1, heads, -1)
        return self.heads.ranks.gather(self.own.positions, self.columns, fill=-1)
