"""Selections choose the slots that a head keeps by their ranking. The fields of a selection are its options.

`rank` may change the numbers that rank slots, before the number of slots of each head is decided (so that runs of
neighbouring tokens stay together); `trim_to_runs` may then lower that number. Each head keeps its best slots; of slots
with equal numbers, the earlier.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from .checks import count, flag
from .heads import LOWEST, order
from .inputs import LayerRows, OwnPolicy, Slots
from .registry import Part, Registry

SELECTIONS: Registry = Registry("selection")


@SELECTIONS.add("token")
@dataclass(frozen=True)
class Selection(Part):
    """Each kv head keeps its best slots."""

    shared: ClassVar[bool] = False  # all heads of a layer keep the same slots
    run: ClassVar[int] = 1  # number of neighbouring tokens that are kept or evicted together
    spares: ClassVar[bool] = False  # `trim_to_runs` may leave some of the budget unused

    def unfinished(self, call: LayerRows) -> Any:
        """Count the last slots that are kept because the text has not reached the end of their run: int or [B]."""
        return 0

    def rank(self, slots: Slots, score: torch.Tensor) -> torch.Tensor:
        """Return the numbers that rank slots, computed from their scores [B, Hkv, C]: fp32 [B, Hkv, C]."""
        return score

    def trim_to_runs(self, slots: Slots, score: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        """Return the number of slots that each head keeps, at most keep [B, Hkv]: [B, Hkv]. A selection with `spares`
        subtracts the slots of a run that would be cut."""
        return keep


@SELECTIONS.add("pooled")
@dataclass(frozen=True)
class PooledTokens(Selection):
    """Each kv head keeps its best slots by the largest score of 7 neighbouring slots (SnapKV's pooling), for layers
    beside others that take the scores as they are (ChunkKV's hybrid)."""

    def rank(self, slots: Slots, score: torch.Tensor) -> torch.Tensor:
        return F.max_pool1d(score.masked_fill(~slots.competing, -torch.inf), 7, 1, 3) if slots.columns else score


@SELECTIONS.add("chunk")
@dataclass(frozen=True)
class Runs(Selection):
    """ChunkKV (Liu et al. 2025): slots are kept in runs of `c` neighbouring tokens.

    c          number of tokens in a run; a slot belongs to run number position // c
    per_head   True: every head ranks its own runs (all heads' runs together if heads compete); False: all heads of a
               layer keep the same slots, chosen by scores averaged over heads
    exact      True: what remains of a head's budget after its last whole run goes to the first members of the next best
               run; False: the remainder is not used
    over_kept  True: runs have protected slots, too, and a run's score is the sum over its alive members. A head that
               keeps n slots besides the protected ones keeps the best n // c runs, and the protected slots of others:
               fewer slots, if these runs have protected or few members (ChunkKV's implementation, appendix)

    A run's score is c times the mean score of its members that are alive and not protected. Every member gets this
    score, so ranking slots by (score, position) ranks whole runs.
    """

    c: int = 10
    per_head: bool = False
    exact: bool = True
    over_kept: bool = False

    @property
    def shared(self) -> bool:
        return not self.per_head

    @property
    def spares(self) -> bool:
        return not self.exact or self.over_kept

    @property
    def run(self) -> int:
        return self.c

    def check(self, policy: OwnPolicy) -> None:
        count("c", self.c, 1)
        flag("per_head", self.per_head)
        flag("exact", self.exact)
        flag("over_kept", self.over_kept)

    def unfinished(self, call: LayerRows) -> Any:
        """Count the slots of the run that a chunk's end cuts, [B]: they are kept until the run is complete. At the
        prompt's end and while decoding the count is 0."""
        return 0 if call.decoding or call.ends_prompt else call.next_position.clamp_min(0) % self.c

    def rank(self, slots: Slots, score: torch.Tensor) -> torch.Tensor:
        if self.shared:
            score = score.mean(1, keepdim=True).expand_as(score)
        runs, column = self._runs(slots), torch.arange(slots.columns, device=slots.device)
        starts = torch.cat([torch.ones_like(runs[..., :1], dtype=torch.bool), runs[..., 1:] != runs[..., :-1]], -1)
        start = column.masked_fill(~starts, 0).cummax(-1).values
        total, size = torch.zeros_like(score), torch.zeros_like(score)
        score = score.masked_fill(~self._members(slots), 0)
        for ahead in range(min(self.c, slots.columns)):  # adds in slot order, so that all machines get equal bits
            same = runs[..., ahead:] == runs[..., : slots.columns - ahead]
            total[..., : slots.columns - ahead] += score[..., ahead:].masked_fill(~same, 0)
            size[..., : slots.columns - ahead] += same
        return (total if self.over_kept else total / size * self.c).gather(-1, start)

    def trim_to_runs(self, slots: Slots, score: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        if self.over_kept:
            each = slots.least + self._of_best_runs(slots, score, (keep - slots.least) // self.c)
            return torch.where((keep < slots.n) & (each > 0), each, keep)  # a head that loses slots keeps 1 at least
        if self.exact:
            return keep
        best = order(slots, score, self.run).sort(-1, descending=True)
        runs = self._runs(slots).gather(-1, best.indices).masked_fill(best.values == LOWEST, -1)
        wanted = (keep - slots.least).long()[..., None]
        lost = wanted < slots.competing.sum(-1, keepdim=True)
        # for each head, the run of the best slot that is lost; -1: no slot is lost
        cut = runs.gather(-1, wanted.clamp_max(slots.columns - 1)).masked_fill(~lost, -1)
        taken = torch.arange(slots.columns, device=slots.device) < wanted
        partial = ((runs == cut) & (cut >= 0) & taken).sum(-1)
        return torch.where(partial < keep, keep - partial, keep).to(torch.int32)  # a head keeps at least 1 slot

    def _of_best_runs(self, slots: Slots, ranks: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Count the unprotected slots of each head's best `wanted` [B, Hkv] runs; of equal runs the earlier is better.
        ranks: the result of `rank`. Returns int32 [B, Hkv]."""
        runs = self._runs(slots)
        first = torch.ones_like(runs, dtype=torch.bool)
        first[..., 1:] = runs[..., 1:] != runs[..., :-1]
        each = ranks.masked_fill(~(first & (runs >= 0)), -torch.inf)
        place = each.sort(dim=-1, descending=True, stable=True).indices.argsort(dim=-1)  # valid at runs' first slots
        column = torch.arange(slots.columns, device=slots.device).masked_fill(~first, 0).cummax(-1).values
        return ((place.gather(-1, column) < wanted[..., None]) & slots.competing).sum(-1, dtype=torch.int32)

    def _members(self, slots: Slots) -> torch.Tensor:
        """Return whether a slot is a member of a run: bool [B, Hkv, C]."""
        return slots.positions >= 0 if self.over_kept else slots.competing

    def _runs(self, slots: Slots) -> torch.Tensor:
        """Return the run number of every slot that is a member of a run, [B, Hkv, C]; -1 in the other columns."""
        return (slots.positions // self.c).masked_fill(~self._members(slots), -1)
