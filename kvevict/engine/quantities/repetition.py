from dataclasses import dataclass, replace

import torch

from ... import _ops
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
        (part,) = observation.parts
        kv, stored = slots.kv, slots.kv.stored
        k, v = (torch.cat(pair, 2) for pair in zip((kv.k, kv.v), kv.appended, strict=True))
        padded = bool(kv.padding.any())
        q = rolled(part.q, -part.skip) if padded else part.q  # in the order of their keys
        with kv.rotated():
            sinks = stored.len.clamp_max(self.sink)
            _, lse = _ops.attend(q, stored.k, stored.v, stored.offset, sinks, k, v, kv.first, **kv.options)
        part = replace(part, lse=rolled(lse, part.skip) if padded else lse)
        return observed(_ops.score, slots, part, reduce="max", group="max", columns=slots.columns).clamp_max(1)
