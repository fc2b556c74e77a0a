from dataclasses import dataclass
from typing import ClassVar

import torch

from .... import _ops, families
from .. import moments
from . import QUANTITIES, Quantity


@dataclass(frozen=True)
class OfQueries(Quantity):
    """A quantity made of the moments of queries before rotation (engine/measure/moments.py).

    sink    rows at first positions do not count
    stats   file with the moments (`kvevict statistics`); None: moments of all prompts read into the cache
    """

    sink: int = 4
    stats: str | None = None
    observes: ClassVar[bool] = False
    rotates: ClassVar[bool] = True

    def ready(self, decoder, modules):
        if self.stats is not None:
            moments.forget(decoder)
            moments.loaded(self.stats, decoder, [module.layer_idx for module in modules])

    def accumulate(self, rows):
        if self.stats is None:
            at = rows.step.positions[:, : rows.columns]
            counts = (at >= self.sink) & (torch.arange(rows.columns, device=at.device) >= rows.first[:, None])
            rows.layer.moments = moments.accumulated(
                rows.layer.moments, rows.step.decoder, rows.module, rows.q[:, :, : rows.columns], at, counts,
                rows.step.patch.rotates[rows.module.layer_idx],
            )  # fmt: skip

    def unrotated(self, kv) -> tuple:
        """(mean [B, H, D], covariance [B, H, D, D], mean size [B, H, D]) as `moments.summed`."""
        patch, index = kv.step.patch, kv.module.layer_idx
        batch, heads, width = len(kv.first), patch.local_heads[0], kv.k.shape[3]
        if self.stats is not None:
            known = moments.loaded(self.stats, kv.step.decoder, patch.order)[index]
            each = [patch.ranks.mine(x[None]).expand(batch, *(-1,) * x.ndim) for x in known]
            pad = width - each[0].shape[-1]
            each = [torch.nn.functional.pad(x, (0, pad) * (x.ndim - 2)) for x in each]
        else:
            past = kv.layer.moments
            none = kv.k.new_zeros(batch, heads, 1 + width, 1 + width).float()
            each = [*moments.summed(none if past is None else past)]
        return tuple(x.to(kv.k.device) for x in each)

    def turned(self, kv, x, ahead):
        """Queries x [B, H, p, D] before rotation, rotated to the positions ahead [n] of the last token: the mean over
        these."""
        step, module = kv.step, kv.module
        if not step.patch.rotates[module.layer_idx]:
            return x
        tokens = step.positions.shape[1] - step.appended
        # A call of repeated rows alone has no new token: the rows begin right after the prompt's last one.
        last = (step.positions[:, tokens - 1] if tokens else step.positions[:, 0] - 1).long()
        return families.rotate(step.decoder, module, x, 0 * last, last[:, None] + ahead.to(last.device))


@QUANTITIES.add("expected_attention")
@dataclass(frozen=True)
class ExpectedAttention(OfQueries):
    """The expected attention of later queries to a slot (Devoto et al. 2025): [B, Hkv, C].

    With queries before rotation of mean mu and covariance S, and R the mean rotation to the next `span` positions:
    z_i = exp((R mu).k_i scale + k_i^T (R S R^T) k_i scale^2 / 2), divided by its sum over the slots after the first
    `sink`, and 0 for these; then the mean over the query heads of a group. Softcaps and attention sinks are left out.
    """

    span: int = 512

    def scans(self):
        return 1

    def products(self, rows, slots):
        return slots + (rows if self.stats is None else 0)

    def measure(self, slots, observation):
        kv = slots.kv
        mean, covariance = self._later(kv)
        scale, heads = kv.options["scale"], mean.shape[1] // slots.n.shape[1]
        form = dict(matrix=covariance * (scale**2 / 2), linear=mean * scale, columns=slots.columns)
        power = _ops.quadratic(kv.stored, kv.k, kv.first, kv.end, **form)
        column = torch.arange(slots.columns, device=slots.device)
        others = (column < self.sink) | (column >= slots.n.repeat_interleave(heads, 1)[..., None])
        return slots.heads.reduce(power.masked_fill(others, -torch.inf).softmax(-1).masked_fill(others, 0), "mean")

    def _later(self, kv) -> tuple:
        """(mean [B, H, D], covariance [B, H, D, D]) of queries at the next `span` positions."""
        mean, covariance, _ = self.unrotated(kv)
        if not kv.step.patch.rotates[kv.module.layer_idx]:
            return mean, covariance
        ahead = 1 + torch.arange(self.span)
        both = self.turned(kv, torch.cat([mean[:, :, None], covariance], 2), ahead)  # rows are R mu and those of S R^T
        return both[:, :, 0], self.turned(kv, both[:, :, 1:].mT, ahead)
