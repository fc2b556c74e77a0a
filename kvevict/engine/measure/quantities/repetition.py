from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ....ops import _ops
from ....policy.inputs import CallRows, Need, Observation, Observers, Slots
from ....policy.rows import Rows
from ....policy.seen.rows import rolled
from ....policy.seen.slots import KV
from .. import projection
from . import QUANTITIES, Quantity, observed

Appended = tuple[torch.Tensor, torch.Tensor]  # (k, v) [B, heads, p, D] of the p repeated rows, which are not stored


@QUANTITIES.add("repetition")
@dataclass(frozen=True)
class RepeatedAttention(Quantity):
    """The largest attention weight on a slot over the repeated rows (rows="repeat") and the query heads of a group
    (KVzip, section 3.2): [B, Hkv, C]. The softmax of a repeated row spans the head's first `sink` slots, the slots of
    the chunk or part that is repeated, and the repeated rows up to this row.

    A slot outside this span gets exp(logit - lse), like a slot inside, but at most 1. If the prompt is repeated in
    parts, only slots of the repeated part and slots before the prompt get a number, all others NaN.
    """

    sink: int = 4
    needs: ClassVar[tuple[str | Need, ...]] = ("appended",)

    def attend(
        self, rows: Rows, step: CallRows, op: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        if not rows.repeats or (rows.observing(step) < step.appended).any():
            return None
        last = dict(row_first=0 * step.first, stop=step.columns + 0 * step.first, observers=step.appended)
        out, lse, largest = op(**last, causal=False, reduce="max", group="max", span=self.sink)
        return out, lse, largest.clamp_max(1)

    def measure(self, slots: Slots, observation: Observation, appended: Appended) -> torch.Tensor:
        (part,), kv, stored = observation.parts, slots.kv, slots.kv.stored
        part = self.spanning(slots, part, appended)
        if part.of is None:
            everything = kv.within(0 * stored.len, stored.len)
            return _largest(replace(slots, kv=everything), part, slots.columns)
        prompt, start, count = (x[:, None].expand_as(stored.len) for x in part.of)
        old = stored.len - prompt
        found = torch.full((*slots.n.shape, slots.columns), torch.nan, device=slots.device)
        for begin, length in ((0 * old, old), (old + start, count)):
            most = int(length.max()) if length.numel() else 0
            if most:
                own = _largest(replace(slots, kv=kv.within(begin, length)), part, most)
                found = _placed(found, own, begin[:, : own.shape[1]], length[:, : own.shape[1]])
        return found

    def spanning(self, slots: Slots, part: Observers, appended: Appended) -> Observers:
        """Return the observers with their log-sum-exp (lse) taken over what the softmax spans: the first `sink` slots,
        the chunk or part that is repeated, and the repeated rows."""
        kv, stored = slots.kv, slots.kv.stored
        if part.of is None:
            return self._spanning(part, kv, appended, 0 * stored.len, stored.len.clamp_max(self.sink))
        prompt, start, count = (x[:, None].expand_as(stored.len) for x in part.of)
        return self._spanning(part, kv, appended, stored.len - prompt + start, count)

    def _spanning(
        self, part: Observers, kv: KV, appended: Appended, begin: torch.Tensor, count: torch.Tensor
    ) -> Observers:
        """Return the observers with their log-sum-exp (lse) taken over each head's stored slots
        begin .. begin + count - 1, those of its first `sink` slots that come before them, the chunk's new slots and the
        repeated rows. begin, count: [B, heads]."""
        within, options = kv.within(begin, count).stored, kv.options
        k, v = (torch.cat(pair, 2) for pair in zip((kv.k, kv.v), appended, strict=True))
        moved = bool(part.skip.any())
        q = rolled(part.q, -part.skip) if moved else part.q  # queries in the order of the appended keys
        _, lse = _ops.attend(q, within, k, v, kv.first, **options)
        sinks = begin.clamp_max(self.sink).contiguous()
        if bool(sinks.any()):
            none, no_rows, held = 0 * kv.first, k[:, :, :0], kv.within(0 * begin, sinks).stored
            _, more = _ops.attend(q, held, no_rows, no_rows, none, stop=none, **options | dict(sinks=None))
            lse = torch.logaddexp(lse, more)
        return replace(part, lse=rolled(lse, part.skip) if moved else lse)


def _largest(slots: Slots, part: Observers, columns: int) -> torch.Tensor:
    """The largest attention weight of the rows and heads of a group on each of the first `columns` slots, capped at 1:
    [B, Hkv, columns]."""
    return observed(_ops.score, slots, part, reduce="max", group="max", columns=columns).clamp_max(1)


def _placed(found: torch.Tensor, own: torch.Tensor, begin: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Return a copy of `found` [B, Hkv, C] with the first `count` columns of `own` [B, Hkv, K] in its columns from
    `begin` on. begin, count: [B, Hkv]."""
    place = torch.arange(found.shape[2], device=found.device) - begin[..., None]
    inside = (place >= 0) & (place < count[..., None])
    return torch.where(inside, own.gather(2, place.clamp(0, own.shape[2] - 1)), found)


@QUANTITIES.add("repeated_output")
@dataclass(frozen=True)
class RepeatedOutput(RepeatedAttention):
    """The largest contribution of slot i to a repeated row j, relative to the attention block's input x_j (KVzip+,
    Jegou and Jeblick 2026, section 2.2): the maximum over rows j and the heads h of a group of
    a_ji ||W_O,h v_i||_2 / ||x_j||_2, with attention weight a_ji, value v_i and output projection W_O,h."""

    needs: ClassVar[tuple[str | Need, ...]] = ("appended", "hidden", "output_gram")
    attend = Quantity.attend

    def ready(self, decoder: torch.nn.Module, modules: list[torch.nn.Module]) -> None:
        projection.check(modules)

    def measure(
        self, slots: Slots, observation: Observation, appended: Appended, hidden: torch.Tensor, gram: torch.Tensor
    ) -> torch.Tensor:
        (part,) = observation.parts
        part = self.spanning(slots, part, appended)
        size = hidden[:, -part.q.shape[2] :].float().norm(dim=-1)
        size = rolled(size[:, None], part.skip)  # [B, 1, R] norms ||x_j||_2, in the order of the observers' rows
        counts = torch.arange(size.shape[2], device=size.device) >= part.skip[:, None, None]
        most = 1 / torch.where(counts, size, torch.inf).amin(2, keepdim=True)
        weighed = replace(part, lse=part.lse + size.log())  # a / ||x|| = exp(logit - lse - ln ||x||)
        a = observed(_ops.score, slots, weighed, reduce="max", group="none", columns=slots.columns)
        found = slots.heads.reduce(torch.minimum(a, most) * projection.norms(slots, gram), "max")
        if part.of is None:
            return found
        prompt, start, count = (x[:, None, None] for x in part.of)
        place = torch.arange(found.shape[2], device=found.device) - (slots.n[..., None] - prompt)
        inside = (place < 0) | ((place >= start) & (place < start + count))
        return found.masked_fill(~inside, torch.nan)
