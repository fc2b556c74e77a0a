"""One layer's alive slots before a cut, and their heads."""

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
    """Positions of slots that are not chosen by score alone."""

    kept: Any = None  # int32 [B, 2] positions (start, stop) that are always kept; None: no positions
    # int32 [B, 2] (position, n): of the slots from that position on a head keeps n, as long as there are others; None:
    # no limit
    limited: Any = None


FREE = Bounds()  # every position is chosen by score


@dataclass(frozen=True, eq=False)
class Heads:
    """The kv heads of a layer that choose slots on this rank: all of them, or a rank's part (tensor parallel). All
    heads share latents (MLA), so these count as one head."""

    ranks: Any  # kvevict.engine.memory.ranks.Ranks
    count: int

    def numbers(self, device: torch.device) -> torch.Tensor:
        """Return the indices of these heads among the layer's: int64 [Hkv]."""
        return self.ranks.rank * self.count + torch.arange(self.count, device=device)

    def gather(self, x: torch.Tensor, columns: int | None = None) -> torch.Tensor:
        """Gather x [B, Hkv, ..] of all ranks' heads. columns: the size to which x [B, Hkv, C] is padded with 0."""
        return self.ranks.gather(x, columns)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum all ranks' x."""
        return self.ranks.sum(x)

    def reduce(self, x: torch.Tensor, how: str) -> torch.Tensor:
        """Reduce x [B, H, C] of query heads over each group ("sum", "mean", "max"): [B, Hkv, C]; "none": leave it."""
        return x if how == "none" else REDUCE[how](x.unflatten(1, (self.count, -1)), 2)

    def merge(self, x: torch.Tensor) -> torch.Tensor:
        """Merge x [B, heads, C] for one choice: for latents, the mean over the heads that share them."""
        return x if x.shape[1] == self.count else x.mean(1, keepdim=True)


@dataclass(frozen=True, eq=False)
class KV:
    """Keys and values of [stored | new] as the ops read them; for latents, those of every head."""

    stored: Any  # of the stored slots: `k`, `v` [N, D], `pos` [N], `offset`, `len` [B, heads]
    k: torch.Tensor  # new keys [B, heads, S, D]
    v: torch.Tensor  # new values [B, heads, S, D]
    first: torch.Tensor  # [B] int32 columns of left padding
    options: dict[str, Any]  # scale, softcap, sinks of attention

    end = property(lambda self: self.k.shape[2] + 0 * self.first)  # [B] number of new columns

    def within(self, begin: torch.Tensor, count: torch.Tensor) -> "KV":
        """Return a copy with only the stored slots begin .. begin + count - 1 [B, heads]."""
        return replace(self, stored=self.stored.within(begin, count.contiguous()))


@dataclass(frozen=True, eq=False)
class Slots:
    """The alive slots of one layer: head (b, h) has n[b,h], first the stored ones, then the new ones, without padding.
    The largest n is C, `columns`."""

    index: int  # the decoder layer's number
    heads: Heads
    all_counts: np.ndarray  # [B, heads of all ranks] slot counts, on the host
    protected: tuple[torch.Tensor, torch.Tensor]  # (first, last) int32 [B]: slots at either end that are always kept
    pos: Any = None  # int32 [B, S] positions of the new columns
    stored: Any = None  # of the stored slots of these heads: `pos` [N], `offset`, `len` [B, Hkv], `counts` on the host
    kv: Any = None  # the `KV`; None for the slots of all ranks, as no rank holds all keys and values
    prompt: np.ndarray | None = None  # [B, heads of all ranks] how many first slots of a head stay: `keep_prompt`
    bounds: Bounds = FREE  # further positions that are always kept, or of which a head keeps few

    device = property(lambda self: self.protected[0].device)

    @cached_property
    def n(self) -> torch.Tensor:
        """The slot counts, int32 [B, Hkv]."""
        return self.stored.len + (self.kv.k.shape[2] - self.kv.first)[:, None]

    @cached_property
    def counts(self) -> np.ndarray:
        """`n` on the host."""
        return self.heads.ranks.mine(self.all_counts)

    @cached_property
    def columns(self) -> int:
        return int(self.counts.max()) if self.counts.size else 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape [B, Hkv, C] of a number for each slot."""
        return *self.counts.shape, self.columns

    @cached_property
    def padding(self) -> np.ndarray:
        """The columns of left padding, `kv.first`, on the host: int [B]. Read it, and `n`, before the slots are cut."""
        return self.kv.k.shape[2] - (self.counts - self.stored.counts)[:, 0]

    @cached_property
    def past(self) -> torch.Tensor:
        """The prompt's slots that each head keeps beside its budget, int32 [B, Hkv]; 0 if prompts are cut too."""
        if self.prompt is None:
            return torch.zeros_like(self.n)
        return _ops.upload(self.heads.ranks.mine(self.prompt), self.device, torch.int32)

    @cached_property
    def first(self) -> torch.Tensor:
        """The number of protected first slots of each head, int32 [B, Hkv]."""
        return torch.maximum(self.protected[0][:, None], self.past)

    @cached_property
    def alive(self) -> np.ndarray:
        """The slot count of all ranks' heads together, on the host: int [B]."""
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
        """Whether `bounds` keep a slot that is not protected as one of the first or last, bool [B, Hkv, C]."""
        return self.at(self.bounds.kept) & self._inner

    def at(self, span: torch.Tensor) -> torch.Tensor:
        """Return whether a slot's position is within span [B, 2] (start, stop): bool [B, Hkv, C]."""
        start, stop = self.around(span)
        column = torch.arange(self.columns, device=self.device)
        return (column >= start[..., None]) & (column < stop[..., None])

    def around(self, span: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the slots (start, stop), int32 [B, Hkv] each, whose positions are within span [B, 2] (start, stop)."""
        if span not in self._around:
            start, stop = self.below(span).unbind()
            self._around[span] = start, stop
        return self._around[span]

    @cached_property
    def _around(self) -> dict[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """The results of `around` so far, by span."""
        return {}

    def of_head(self, x: torch.Tensor, b: int, h: int) -> torch.Tensor:
        """Return x [B, Hkv, C] at the alive slots of batch row b and kv head h; latents have one head for all h."""
        h = min(h, self.n.shape[1] - 1)
        return x[b, h, : self.counts[b, h]]

    def below(self, limits: torch.Tensor) -> torch.Tensor:
        """Count the slots with positions below each of the limits [B, n]: int32 [n, B, Hkv]."""
        at = self.positions
        return ((at >= 0) & (at < limits.T[..., None, None])).sum(-1, dtype=torch.int32)

    def beyond(self, ranks: torch.Tensor) -> torch.Tensor:
        """Mark the competing slots that exceed the limit of `bounds`: bool [B, Hkv, C]. Protected slots count first,
        then slots of better `ranks`."""
        start, most = self.bounds.limited[:, :, None, None].unbind(1)
        limited = self.positions >= start
        inside = limited & self.competing
        best = ranks.masked_fill(~inside, -torch.inf).argsort(dim=-1, descending=True, stable=True)
        return inside & (best.argsort(dim=-1) >= most - (limited & ~inside).sum(-1, keepdim=True))

    @cached_property
    def _inner(self) -> torch.Tensor:
        """Whether a slot exists and is not protected as one of the first or last, bool [B, Hkv, C]."""
        column = torch.arange(self.columns, device=self.device)
        return (column >= self.first[..., None]) & (column < (self.n - self.protected[1][:, None])[..., None])

    @cached_property
    def positions(self) -> torch.Tensor:
        """The positions of the alive slots, ascending, -1 past a head's end: int32 [B, Hkv, C]."""
        stored, first = self.stored, self.kv.first
        column = torch.arange(self.columns, device=self.device)
        table = torch.cat([stored.pos, self.pos.flatten(), stored.pos.new_full((1,), -1)])
        row = torch.arange(self.n.shape[0], device=self.device)[:, None, None]
        new = len(stored.pos) + row * self.pos.shape[1] + first[:, None, None] + column - stored.len[..., None]
        place = torch.where(column < stored.len[..., None], stored.offset[..., None] + column, new)
        return table[place.masked_fill(column >= self.n[..., None], -1)]

    def all_ranks(self, shared: bool) -> "Slots":
        """Return the slots of all ranks' heads, for parts that compare heads. shared: all heads hold the same slots."""
        if self.heads.ranks.size == 1:
            return self
        return _AllRanks(
            self.index, self.heads, self.all_counts, self.protected, prompt=self.prompt, bounds=self.bounds, own=self,
            shared=shared,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _AllRanks(Slots):
    """Slots of all ranks' heads. Positions are gathered on first use: heads with equal budgets never need them."""

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
