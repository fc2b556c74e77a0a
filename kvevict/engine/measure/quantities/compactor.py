"""Compactor's quantities (Chari & Van Durme 2025), from a chunk's keys, values and queries. They are computed for fresh
slots only: other slots carry the numbers of earlier cuts (carry="keep")."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F

from ....policy.inputs import Need, Observation, Slots
from ....policy.seen.slots import Heads
from ..rope import Rope
from . import QUANTITIES, Quantity

RIDGE = 0.01  # on the diagonal of X^T X
SKETCH, SEED = 48, 0  # columns and seed of the Gaussian sketch of keys, as in kvpress
BLOCK = 256  # rows and slots of a block of attention, as in kvpress


class Fresh(NamedTuple):
    """The slots of one batch row that carry no number, L in each head: those decoded since the last chunk, then the new
    ones, without the text's first `sink`."""

    row: int
    columns: torch.Tensor  # [H, L] their columns among the head's alive slots
    k: torch.Tensor  # fp32 [H, L, D]
    pos: torch.Tensor  # [L]
    decoded: int  # number of slots that were decoded: the first ones
    counted: int  # number of slots that means and deviations are taken over: the first ones


def _fresh(slots: Slots, sink: int, recent: int, carried: torch.Tensor | None, ends: bool) -> Iterator[Fresh]:
    """Yield the `Fresh` slots of every batch row. ends: the prompt ends, and its last `recent` slots are not
    counted."""
    kv, stored = slots.kv, slots.kv.stored
    for b, first in enumerate(slots.padding.tolist()):
        first += int((slots.pos[b, first:] < sink).sum())
        decoded = _unnumbered(slots.stored, carried, b)
        old = stored.offset[b] + stored.len[b] - decoded  # [H]
        old = old[:, None] + torch.arange(decoded, device=slots.device)
        k = torch.stack([stored.numbers("k", b, h, rows) for h, rows in enumerate(old)])
        k = torch.cat([k, kv.k[b, :, first:]], 1)
        pos = torch.cat([stored.pos[old[0]], slots.pos[b, first:]])
        length = k.shape[1]
        alive = stored.len[b] + kv.k.shape[2] - int(slots.padding[b])
        columns = (alive - length)[:, None] + torch.arange(length, device=slots.device)
        yield Fresh(b, columns, k.float(), pos, decoded, max(length - recent * ends, 0))


def _unnumbered(stored: Any, carried: torch.Tensor | None, row: int) -> int:
    """The number of a batch row's last stored slots that carry no number."""
    if carried is None:
        return int(stored.counts[row].min())
    there = torch.arange(carried.shape[-1], device=carried.device) < stored.len[row, :, None]
    return int((stored.len[row] - (there & ~carried[row].isnan()).sum(-1)).min())


def _standard(x: torch.Tensor, counted: int, heads: Heads) -> torch.Tensor:
    """Standardise x [H, L] by the mean and the deviation of the first `counted` slots of all ranks' heads."""
    part = x[:, :counted].double()
    number = max(part.numel() * heads.ranks.size, 1)
    mean = heads.sum(part.sum()) / number
    deviation = (heads.sum((part - mean).square().sum()) / max(number - 1, 1)).sqrt()
    return ((x - mean) / deviation.clamp_min(1e-6)).float()


@dataclass(frozen=True)
class OfFresh(Quantity):
    """A quantity [B, Hkv, C] of the `Fresh` slots; other slots, also the text's first `sink`, get 0."""

    sink: int = 8
    recent: int = 4
    needs: ClassVar[tuple[str | Need, ...]] = ("carried", "ends_prompt")

    def measure(
        self, slots: Slots, observation: Observation, carried: torch.Tensor | None, ends_prompt: bool, *more: Any
    ) -> torch.Tensor:
        out = torch.zeros(*slots.kv.stored.len.shape, slots.columns, device=slots.device)
        for fresh in _fresh(slots, self.sink, self.recent, carried, ends_prompt):
            out[fresh.row].scatter_(1, fresh.columns, self._of(slots, fresh, observation, *more))
        return slots.heads.merge(out)

    def _of(self, slots: Slots, fresh: Fresh, observation: Any, *more: Any) -> torch.Tensor:
        """The quantity [H, L] of one batch row's fresh slots."""
        raise NotImplementedError


@QUANTITIES.add("leverage")
@dataclass(frozen=True)
class Leverage(OfFresh):
    """Statistical leverage of un-rotated keys: diag X (X^T X + 0.01)^-1 X^T, X being centred keys times a Gaussian
    sketch that all heads share; in standard deviations over the row's heads and slots."""

    observes: ClassVar[bool] = False
    needs: ClassVar[tuple[str | Need, ...]] = (*OfFresh.needs, "rope")

    def _of(self, slots: Slots, fresh: Fresh, observation: Observation, rope: Rope) -> torch.Tensor:
        keys = rope.unrotated(fresh.k[None], fresh.pos[None])[0] if len(fresh.pos) else fresh.k
        counted = keys[:, : fresh.counted]
        mean = counted.sum(1, keepdim=True) / max(fresh.counted, 1)
        # In fp64: the rounding error of (X^T X)^-1 grows with the spread of its eigenvalues.
        x = ((keys - mean) @ sketch(keys.shape[-1]).to(keys)).double()
        inner = x[:, : fresh.counted]
        eye = torch.eye(SKETCH, dtype=x.dtype, device=x.device)
        solved = torch.linalg.solve(inner.mT @ inner + RIDGE * eye, x.mT)
        return _standard((x * solved.mT).sum(-1), fresh.counted, slots.heads)


@QUANTITIES.add("block_attention")
@dataclass(frozen=True)
class BlockAttention(OfFresh):
    """Non-causal attention to slots within blocks of the chunk, logits not scaled: summed over rows, mean over the
    group, times ||v_i||_2, averaged over 3 slots; in standard deviations over the row's heads and slots. Decoded slots
    have the mean, because their queries are gone."""

    def _of(self, slots: Slots, fresh: Fresh, observation: Observation) -> torch.Tensor:
        kv, b = slots.kv, fresh.row
        k = fresh.k[:, fresh.decoded :]
        rows, counted = k.shape[1], max(fresh.counted - fresh.decoded, 0)
        (part,) = observation.parts
        q = part.q[b, :, part.q.shape[2] - rows :].float().unflatten(0, (len(k), -1))  # [H, G, rows, D]
        edges = [*range(0, counted, BLOCK), counted, rows]
        attended = [
            (q[:, :, i:j] @ k[:, None, i:j].mT).softmax(-1).sum(-2).mean(1) for i, j in pairwise(edges) if i < j
        ]
        norms = kv.v[b, :, kv.v.shape[2] - rows :].float().norm(dim=-1)
        score = (torch.cat(attended, 1) if attended else norms) * norms
        parts = [F.avg_pool1d(x, 3, 1, 1) for x in (score[:, :counted], score[:, counted:]) if x.shape[1]]
        score = _standard(torch.cat(parts, 1) if parts else score, counted, slots.heads)
        return F.pad(score, (fresh.decoded, 0))


def sketch(width: int) -> torch.Tensor:
    """A Gaussian sketch [width, SKETCH] with entries of variance 1 / SKETCH, equal on every device."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randn(width, SKETCH, generator=generator) / SKETCH**0.5
