from dataclasses import dataclass
from typing import ClassVar

import torch

from ....ops import _ops
from ....policy.inputs import LayerRows, Need, Observation, Slots, need
from .. import moments
from ..rope import Rope
from . import QUANTITIES, Quantity

QueryMoments = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # (mean, covariance, mean size) by `moments.summed`
SPAN = 512  # later queries are expected at this number of positions after the last token


@dataclass(frozen=True)
class OfQueries(Quantity):
    """Base class of quantities computed from moments of queries before rotation (engine/measure/moments.py).

    sink    the queries at this number of first positions are left out of the moments
    stats   file with the moments (`kvevict statistics`); None: moments of all prompts read into the cache
    """

    sink: int = 4
    stats: str | None = None
    observes: ClassVar[bool] = False

    @property
    def needs(self) -> tuple[str | Need, ...]:
        return "rope", need("moments", stats=self.stats), "last_position"

    @property
    def remembers(self) -> str:
        return "moments" if self.stats is None else ""

    def ready(self, decoder: torch.nn.Module, modules: list[torch.nn.Module]) -> None:
        if self.stats is not None:
            moments.loaded(self.stats, decoder, anew=True)

    def accumulate(self, rows: LayerRows, past: torch.Tensor | None) -> torch.Tensor | None:
        at = rows.positions[:, : rows.columns]
        counts = (at >= self.sink) & (torch.arange(rows.columns, device=at.device) >= rows.first[:, None])
        return moments.accumulated(past, rows.rope, rows.q[:, :, : rows.columns], at, counts)


def rotated_ahead(rope: Rope, last: torch.Tensor, x: torch.Tensor, ahead: torch.Tensor) -> torch.Tensor:
    """Rotate x [B, H, p, D] from position 0 to the positions last[b] + ahead[i], last [B] and ahead [n], and return the
    mean over i."""
    return rope.rotated(x, 0 * last, last[:, None] + ahead.to(last.device))


@QUANTITIES.add("expected_attention")
@dataclass(frozen=True)
class ExpectedAttention(OfQueries):
    """The attention weight that later queries are expected to give to a slot (Expected Attention, Devoto et al. 2025):
    [B, Hkv, C].

    With mean mu and covariance S of a query head's queries before rotation, and R the mean rotation to the next `SPAN`
    positions, z_i = exp((R mu).k_i scale + k_i^T (R S R^T) k_i scale^2 / 2). The result is z_i divided by its sum over
    the slots after the first `sink` ones, which get 0; averaged over the query heads of a group. Softcaps and attention
    sinks are left out.
    """

    def measure(
        self, slots: Slots, observation: Observation, rope: Rope, of_queries: QueryMoments, last: torch.Tensor
    ) -> torch.Tensor:
        kv = slots.kv
        mean, covariance = self._later(rope, of_queries, last)
        scale, heads = kv.options["scale"], mean.shape[1] // slots.n.shape[1]
        form = dict(matrix=covariance * (scale**2 / 2), linear=mean * scale, columns=slots.columns)
        power = _ops.quadratic(kv.stored, kv.k, kv.first, kv.end, **form)
        column = torch.arange(slots.columns, device=slots.device)
        others = (column < self.sink) | (column >= slots.n.repeat_interleave(heads, 1)[..., None])
        return slots.heads.reduce(power.masked_fill(others, -torch.inf).softmax(-1).masked_fill(others, 0), "mean")

    def _later(self, rope: Rope, of_queries: QueryMoments, last: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The (mean R mu [B, H, D], covariance R S R^T [B, H, D, D]) of queries after the mean rotation R to the next
        `SPAN` positions."""
        mean, covariance, _ = of_queries
        if not rope.rotates:
            return mean, covariance
        ahead = 1 + torch.arange(SPAN)
        both = torch.cat([mean[:, :, None], covariance], 2)
        both = rotated_ahead(rope, last, both, ahead)  # [B, H, 1 + D, D]: the row R mu, then the rows of S R^T
        return both[:, :, 0], rotated_ahead(rope, last, both[:, :, 1:].mT, ahead)
