"""One layer's alive slots before a cut, and their heads."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from ...ops import _ops

REDUCE: dict[str, Any] = {"sum": torch.sum, "mean": torch.mean, "max": torch.amax}


class Bounds(NamedTuple):
    """Positions of slots that are not chosen by score alone."""

    kept: Any = None  # int32 [B, 2] positions (start, stop) that are always kept; None: there are none
    limited: Any = None  # int32 [B, 2] (position, n): from there on a head keeps n, if others are left; None: no limit


FREE = Bounds()  # all are chosen by score


@dataclass(frozen=True, eq=False)
class Heads:
    """The kv heads of a layer that choose slots on this rank: all of them, or a rank's part (tensor parallel). All
    heads share latents (MLA), so these count as one head."""

    ranks: Any  # kvevict.engine.memory.ranks.Ranks
    count: int

    def numbers(self, device: Any) -> torch.Tensor:
        """int64 [Hkv] the indices of these heads among the layer's."""
        return self.ranks.rank * self.count + torch.arange(self.count, device=device)

    def gather(self, x: torch.Tensor, columns: Any = None) -> torch.Tensor:
        """Gather x [B, Hkv, ..] of all ranks' heads; columns: pad x [B, Hkv, C] with 0 to so many."""
        return self.ranks.gather(x, columns)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x."""
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
    k: torch.Tensor  # [B, heads, S, D] new ones
    v: torch.Tensor
    first: torch.Tensor  # [B] int32 columns of left padding
    options: dict[str, Any]  # scale, softcap, sinks of attention

    end = property(lambda self: self.k.shape[2] + 0 * self.first)  # [B] the new columns' end

    def within(self, begin: torch.Tensor, count: torch.Tensor) -> "KV":
        """The same, with only stored slots begin .. begin + count - 1 [B, heads]."""
        return replace(self, stored=self.stored.within(begin, count.contiguous()))


@dataclass(frozen=True, eq=False)
class Slots:
    """The alive slots of one layer: n[b,h] in head (b, h), first the stored ones, then the new; no padding. C =
    `columns` is the largest n."""

    index: int  # the decoder layer's number
    heads: Heads
    all_counts: np.ndarray  # [B, heads of all ranks] slot counts, on the host
    protected: tuple[Any, ...]  # (first, last) int32 [B]: how many slots at either end are kept at any score
    pos: Any = None  # int32 [B, S] of the new columns
    stored: Any = None  # of the stored slots of these heads: `pos` [N], `offset`, `len` [B, Hkv], `counts` on the host
    kv: Any = None  # None for all ranks' heads: no rank holds all of them
    prompt: np.ndarray | None = None  # [B, heads of all ranks] how many first slots of a head stay: `keep_prompt`
    bounds: Bounds = FREE  # positions that stay at any score too, and those that a head keeps few of

    device = property(lambda self: self.protected[0].device)

    @cached_property
    def n(self) -> torch.Tensor:
        """int32 [B, Hkv] slot counts."""
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
        """[B, Hkv, C] of numbers of the slots."""
        return *self.counts.shape, self.columns

    @cached_property
    def padding(self) -> np.ndarray:
        """`kv.first` on the host: int [B] columns of left padding. Read it, and `n`, before the slots are cut."""
        return self.kv.k.shape[2] - (self.counts - self.stored.counts)[:, 0]

    @cached_property
    def past(self) -> torch.Tensor:
        """int32 [B, Hkv] prompt slots that each head keeps beside its budget; 0 if prompts are cut too."""
        if self.prompt is None:
            return torch.zeros_like(self.n)
        return _ops.upload(self.heads.ranks.mine(self.prompt), self.device, torch.int32)

    @cached_property
    def first(self) -> torch.Tensor:
        """int32 [B, Hkv] how many first slots of each head are protected."""
        return torch.maximum(self.protected[0][:, None], self.past)

    @cached_property
    def alive(self) -> Any:
        """int [B] slot count of all ranks' heads together, on the host."""
        return self.all_counts.sum(1)

    @cached_property
    def least(self) -> torch.Tensor:
        """int32 [B, Hkv] how many protected slots each head has."""
        ends = torch.minimum(self.n, self.first + self.protected[1][:, None])
        return ends if self.bounds.kept is None else ends + self.between.sum(-1, dtype=torch.int32)

    @cached_property
    def competing(self) -> torch.Tensor:
        """bool [B, Hkv, C]: the slot exists and is not protected."""
        return self._inner if self.bounds.kept is None else self._inner & ~self.between

    @cached_property
    def between(self) -> torch.Tensor:
        """bool [B, Hkv, C]: the slot is kept by `bounds` and not among the protected ones at the ends."""
        return self.at(self.bounds.kept) & self._inner

    def at(self, span: torch.Tensor) -> torch.Tensor:
        """bool [B, Hkv, C]: the slot is at the positions span [B, 2] (start, stop)."""
        start, stop = self.around(span)
        column = torch.arange(self.columns, device=self.device)
        return (column >= start[..., None]) & (column < stop[..., None])

    def around(self, span: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """int32 [B, Hkv] (start, stop) of the slots at the positions span [B, 2] (start, stop)."""
        if span not in self._around:
            self._around[span] = self.below(span).unbind()
        return self._around[span]

    @cached_property
    def _around(self) -> dict[Any, Any]:
        """Results of `around`."""
        return {}

    def of_head(self, x: torch.Tensor, b: int, h: int) -> torch.Tensor:
        """x [B, Hkv, C] at the alive slots of kv head h, of which latents have one."""
        h = min(h, self.n.shape[1] - 1)
        return x[b, h, : self.counts[b, h]]

    def below(self, limits: torch.Tensor) -> torch.Tensor:
        """int32 [n, B, Hkv] how many slots have positions below each of the limits [B, n]."""
        at = self.positions
        return ((at >= 0) & (at < limits.T[..., None, None])).sum(-1, dtype=torch.int32)

    def beyond(self, ranks: torch.Tensor) -> torch.Tensor:
        """bool [B, Hkv, C]: the competing slots beyond the limit of `bounds`, after protected slots and slots of better
        `ranks` have used it up."""
        start, most = self.bounds.limited[:, :, None, None].unbind(1)
        limited = self.positions >= start
        inside = limited & self.competing
        best = ranks.masked_fill(~inside, -torch.inf).argsort(dim=-1, descending=True, stable=True)
        return inside & (best.argsort(dim=-1) >= most - (limited & ~inside).sum(-1, keepdim=True))

    @cached_property
    def _inner(self) -> torch.Tensor:
        """bool [B, Hkv, C]: the slot exists and is not among the protected ones at the ends."""
        column = torch.arange(self.columns, device=self.device)
        return (column >= self.first[..., None]) & (column < (self.n - self.protected[1][:, None])[..., None])

    @cached_property
    def positions(self) -> torch.Tensor:
        """int32 [B, Hkv, C] positions of the alive slots, ascending; -1 past a head's end."""
        stored, first = self.stored, self.kv.first
        column = torch.arange(self.columns, device=self.device)
        table = torch.cat([stored.pos, self.pos.flatten(), stored.pos.new_full((1,), -1)])
        row = torch.arange(self.n.shape[0], device=self.device)[:, None, None]
        new = len(stored.pos) + row * self.pos.shape[1] + first[:, None, None] + column - stored.len[..., None]
        place = torch.where(column < stored.len[..., None], stored.offset[..., None] + column, new)
        return table[place.masked_fill(column >= self.n[..., None], -1)]

    def all_ranks(self, shared: bool) -> "Slots":
        """The slots of all ranks' heads, for parts that compare heads. shared: all heads hold the same slots."""
        if self.heads.ranks.size == 1:
            return self
        return _AllRanks(
            self.index, self.heads, self.all_counts, self.protected, prompt=self.prompt, bounds=self.bounds, own=self,
            shared=shared,
        )  # fmt: skip

    def removal_error(self, numbers: torch.Tensor, fast: bool) -> torch.Tensor:
        """CAOTE (eq. 6 and 8), taking numbers [B, Hkv, C] >= 0 as attention weights, as `kvevict.ops._ops.refine`."""
        kv, heads = self.kv, self.kv.stored.len.shape[1]
        if numbers.shape[1] != heads:
            numbers = numbers.expand(-1, heads, -1)
        error = _ops.refine(kv.stored, kv.v, kv.first, kv.end, numbers.contiguous(), fast=fast)
        return self.heads.merge(error)


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
