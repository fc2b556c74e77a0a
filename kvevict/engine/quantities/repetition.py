from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ... import _ops
from .. import projection
from ..observation import rolled
from . import QUANTITIES, Quantity, observed


@QUANTITIES.add("repetition")
@dataclass(frozen=True)
class Repetition(Quantity):
    """The largest attention weight, over rows and the heads of a group, of repeated rows (rows="repeat") whose softmax
    spans a head's first `sink` slots, the chunk, and what of the repetition each row sees (KVzip, section 3.2).

    Slots that are in none of these get what they would if they were, at most 1.
    """

    sink: int = 4

    def passes(self, known=False):
        return 1

    def attended(self, rows, stored, appended):
        return rows * (min(stored, self.sink) + appended) + rows * (rows + 1) // 2

    def measure(self, slots, observation):
        part = self.spanning(slots, *observation.parts)
        return observed(_ops.score, slots, part, reduce="max", group="max", columns=slots.columns).clamp_max(1)

    def spanning(self, slots, part):
        """Observers whose lse is over the slots that their softmax spans."""
        kv, stored = slots.kv, slots.kv.stored
        k, v = (torch.cat(pair, 2) for pair in zip((kv.k, kv.v), kv.appended, strict=True))
        padded = bool(kv.padding.any())
        q = rolled(part.q, -part.skip) if padded else part.q  # in the order of their keys
        with kv.rotated():
            sinks = stored.len.clamp_max(self.sink)
            _, lse = _ops.attend(q, stored.k, stored.v, stored.offset, sinks, k, v, kv.first, **kv.options)
        return replace(part, lse=rolled(lse, part.skip) if padded else lse)


@QUANTITIES.add("repeated_output")
@dataclass(frozen=True)
class RepeatedOutput(Repetition):
    """a_ji ||W_O,h v_i||_2 / ||x_j||_2, the largest over repeated rows j and the heads h of a group (KVzip+, Jegou
    and Jeblick 2026, section 2.2): how much slot i adds at row j, beside what enters the attention block there.

    support   what the softmax of a spans: "chunk", as in `repetition`, or "all" that a row sees
    """

    support: str = "chunk"
    hidden: ClassVar[bool] = True

    def ready(self, decoder, modules):
        for module in modules:
            projection.check(module)

    def attended(self, rows, stored, appended):
        return super().attended(rows, stored, appended) if self.support == "chunk" else 0

    def scans(self):
        return 1

    def products(self, rows, slots):
        return slots

    def measure(self, slots, observation):
        (part,) = observation.parts
        part = self.spanning(slots, part) if self.support == "chunk" else part
        size = slots.kv.hidden[:, -part.q.shape[2] :].float().norm(dim=-1)
        size = rolled(size[:, None], part.skip)  # [B, 1, R], in the observers' order
        counts = torch.arange(size.shape[2], device=size.device) >= part.skip[:, None, None]
        most = 1 / torch.where(counts, size, torch.inf).amin(2, keepdim=True)
        weighed = replace(part, lse=part.lse + size.log())  # a / ||x|| = exp(logit - lse - ln ||x||)
        a = observed(_ops.score, slots, weighed, reduce="max", group="none", columns=slots.columns)
        return slots.heads.reduce(torch.minimum(a, most) * projection.norms(slots), "max")
