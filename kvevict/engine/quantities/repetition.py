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

    Slots that are in none of these get what they would if they were, at most 1; of a prompt that is repeated in parts
    its slots in other parts get NaN.
    """

    sink: int = 4

    def passes(self, known=False):
        return 1

    def looks_at(self, alive, again):
        return again or alive

    def attended(self, tokens, stored, appended):
        return appended * (min(stored, self.sink) + tokens) + appended * (appended + 1) // 2

    def measure(self, slots, observation):
        (part,) = observation.parts
        kv, stored = slots.kv, slots.kv.stored
        with kv.rotated():
            if part.of is None:
                part = self._spanning(part, kv, 0 * stored.len, stored.len.clamp_max(self.sink))
                everything = kv.within(0 * stored.len, stored.len)
                return _largest(replace(slots, kv=everything), part, slots.columns)
            prompt, start, count = (x[:, None].expand_as(stored.len) for x in part.of)
            old = stored.len - prompt
            part = self._spanning(part, kv, old + start, count)
            found = torch.full((*slots.n.shape, slots.columns), torch.nan, device=slots.device)
            for begin, length in ((0 * old, old), (old + start, count)):
                most = int(length.max()) if length.numel() else 0
                if most:
                    own = _largest(replace(slots, kv=kv.within(begin, length)), part, most)
                    found = _placed(found, own, begin[:, : own.shape[1]], length[:, : own.shape[1]])
            return found

    def _spanning(self, part, kv, begin, count):
        """The observers, with the log-sum-exp of a softmax over stored slots begin .. begin + count - 1 [B, heads],
        the chunk and the repetition, and over those of the first `sink` slots that come before."""
        stored, within, options = kv.stored, kv.within(begin, count).stored, kv.options
        k, v = (torch.cat(pair, 2) for pair in zip((kv.k, kv.v), kv.appended, strict=True))
        moved = bool(part.skip.any())
        q = rolled(part.q, -part.skip) if moved else part.q  # in the order of their keys
        _, lse = _ops.attend(q, within.k, within.v, within.offset, within.len, k, v, kv.first, **options)
        sinks = begin.clamp_max(self.sink).contiguous()
        if bool(sinks.any()):
            none, no_rows = 0 * kv.first, k[:, :, :0]
            held = stored.k, stored.v, stored.offset, sinks
            _, more = _ops.attend(q, *held, no_rows, no_rows, none, stop=none, **options | dict(sinks=None))
            lse = torch.logaddexp(lse, more)
        return replace(part, lse=rolled(lse, part.skip) if moved else lse)


def _largest(slots, part, columns):
    return observed(_ops.score, slots, part, reduce="max", group="max", columns=columns).clamp_max(1)


def _placed(found, own, begin, count):
    """`found` [B, Hkv, C] with own [B, Hkv, K] in its columns begin .. begin + count - 1 [B, Hkv]."""
    place = torch.arange(found.shape[2], device=found.device) - begin[..., None]
    inside = (place >= 0) & (place < count[..., None])
    return torch.where(inside, own.gather(2, place.clamp(0, own.shape[2] - 1)), found)
