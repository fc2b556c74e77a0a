"""The quantities of Compactor (Chari & Van Durme 2025), from a chunk's keys, values and queries. They are computed for
slots that have no score yet; other slots carry their scores from earlier cuts (carry="keep")."""

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

RIDGE = 0.01  # added to the diagonal of X^T X before it is inverted
SKETCH, SEED = 48, 0  # number of columns and random seed of the Gaussian sketch of keys, as in kvpress
BLOCK = 256  # number of rows, and of slots, of a block of attention, as in kvpress


class Fresh(NamedTuple):
    """The slots of one batch row that have no score yet, L in each of H kv heads: first those decoded since the last
    chunk, then the chunk's new slots, without the first `sink` tokens of the text."""

    row: int  # the batch row
    columns: torch.Tensor  # [H, L] the slots' indices among the head's alive slots
    k: torch.Tensor  # fp32 [H, L, D] their keys
    pos: torch.Tensor  # [L] their positions
    decoded: int  # number of decoded slots, which come first
    counted: int  # number of first slots whose scores give the means and standard deviations


def _fresh(slots: Slots, sink: int, recent: int, carried: torch.Tensor | None, ends: bool) -> Iterator[Fresh]:
    """Yield the `Fresh` slots of every batch row. carried: the scores that stored slots carry; None: no slot has one.
    ends: the chunk ends the prompt, so its last `recent` slots stay out of `Fresh.counted`."""
    kv, stored = slots.kv, slots.kv.stored
    for b, first in enumerate(slots.padding.tolist()):
        first += int((slots.pos[b, first:] < sink).sum())
        decoded = _unnumbered(slots.stored, carried, b)
        old = stored.offset[b] + stored.len[b] - decoded  # [H] buffer row of each head's first decoded slot
        old = old[:, None] + torch.arange(decoded, device=slots.device)
        k = torch.stack([stored.numbers("k", b, h, rows) for h, rows in enumerate(old)])
        k = torch.cat([k, kv.k[b, :, first:]], 1)
        pos = torch.cat([stored.pos[old[0]], slots.pos[b, first:]])
        length = k.shape[1]
        alive = stored.len[b] + kv.k.shape[2] - int(slots.padding[b])
        columns = (alive - length)[:, None] + torch.arange(length, device=slots.device)
        yield Fresh(b, columns, k.float(), pos, decoded, max(length - recent * ends, 0))


def _unnumbered(stored: Any, carried: torch.Tensor | None, row: int) -> int:
    """The number of last stored slots of batch row `row` that have no score in `carried`."""
    if carried is None:
        return int(stored.counts[row].min())
    there = torch.arange(carried.shape[-1], device=carried.device) < stored.len[row, :, None]
    return int((stored.len[row] - (there & ~carried[row].isnan()).sum(-1)).min())


def _standard(x: torch.Tensor, counted: int, heads: Heads) -> torch.Tensor:
    """Subtract from x [H, L] the mean over the first `counted` slots of all ranks' heads, and divide by their standard
    deviation."""
    part = x[:, :counted].double()
    number = max(part.numel() * heads.ranks.size, 1)
    mean = heads.sum(part.sum()) / number
    deviation = (heads.sum((part - mean).square().sum()) / max(number - 1, 1)).sqrt()
    return ((x - mean) / deviation.clamp_min(1e-6)).float()


@dataclass(frozen=True)
class OfFresh(Quantity):
    """Base class of quantities [B, Hkv, C] that are computed for `Fresh` slots only. All other slots, among them the
    first `sink` tokens of the text, get 0."""

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
        """The quantity [H, L] of the `fresh` slots, which are those of one batch row."""
        raise NotImplementedError


@QUANTITIES.add("leverage")
@dataclass(frozen=True)
class Leverage(OfFresh):
    """The statistical leverage of each key before rotation (Compactor): diag X (X^T X + 0.01 I)^-1 X^T, where X are the
    head's centred keys times a Gaussian sketch that all heads share. It is standardised over the slots of all heads of
    a batch row."""

    observes: ClassVar[bool] = False
    needs: ClassVar[tuple[str | Need, ...]] = (*OfFresh.needs, "rope")

    def _of(self, slots: Slots, fresh: Fresh, observation: Observation, rope: Rope) -> torch.Tensor:
        keys = rope.unrotated(fresh.k[None], fresh.pos[None])[0] if len(fresh.pos) else fresh.k
        counted = keys[:, : fresh.counted]
        mean = counted.sum(1, keepdim=True) / max(fresh.counted, 1)
        # fp64, since the rounding error of (X^T X)^-1 grows with the spread of its eigenvalues.
        x = ((keys - mean) @ sketch(keys.shape[-1]).to(keys)).double()
        inner = x[:, : fresh.counted]
        eye = torch.eye(SKETCH, dtype=x.dtype, device=x.device)
        solved = torch.linalg.solve(inner.mT @ inner + RIDGE * eye, x.mT)
        return _standard((x * solved.mT).sum(-1), fresh.counted, slots.heads)


@QUANTITIES.add("block_attention")
@dataclass(frozen=True)
class BlockAttention(OfFresh):
    """Attention within blocks of the chunk (Compactor): each row attends, without a causal mask and without scaling its
    logits, to the slots of its own block. The weights on slot i are summed over rows, averaged over the query heads of
    a group, multiplied by ||v_i||_2, averaged over 3 neighbouring slots, and standardised over the slots of all heads
    of a batch row. Decoded slots get the mean, 0, because their queries are gone."""

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
    """A Gaussian sketch [width, SKETCH], whose entries have variance 1 / SKETCH and are equal on every device."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randn(width, SKETCH, generator=generator) / SKETCH**0.5
