from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ....ops import _ops
from ....policy.inputs import Observation, Observers, Slots
from . import QUANTITIES, Quantity, each_head


@QUANTITIES.add("worst_attention")
@dataclass(frozen=True)
class WorstAttention(Quantity):
    """The largest attention weight on a slot over the observing rows and the query heads of a group (DefensiveKV):
    [B, Hkv, C], 0 for slots that do not compete. Before the maximum, each row's weights are averaged over `kernel`
    neighbouring competing slots and rescaled to the sum that they had.

    No op computes this, so the attention matrix [G, R, n] of one kv head at a time is materialised.
    """

    kernel: int = 5

    def measure(self, slots: Slots, observation: Observation) -> torch.Tensor:
        heads = slots.kv.stored.len.shape[1]
        out = torch.zeros(slots.n.shape[0], heads, slots.columns, device=slots.device)
        first, last = slots.first.tolist(), slots.protected[1].tolist()
        for part in observation.parts:
            skip = part.skip.tolist()
            for b, h, x, lse in logits(slots, part):
                a = (x - lse[..., None]).exp().nan_to_num(0)[:, skip[b] :]
                start = first[b][min(h, len(first[b]) - 1)]  # latents (MLA) have one number for all heads
                inside = slice(start, max(a.shape[-1] - last[b], start))
                a = a[..., inside]
                if a.numel():
                    near = F.avg_pool1d(a, self.kernel, 1, self.kernel // 2)
                    near = near * (a.sum(-1) / near.sum(-1).clamp_min(1e-30))[..., None]
                    out[b, h, inside] = torch.maximum(out[b, h, inside], near.amax((0, 1)))
        return slots.heads.reduce(out, "max")


def logits(slots: Slots, part: Observers) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
    """Yield (b, h, x [G, R, n], lse [G, R]) for every kv head h of batch row b: the fp32 logits of the observing rows
    in the group's query heads, -inf at slots that a row does not see, and their log-sum-exp."""
    kv, stored = slots.kv, slots.kv.stored
    group, scale = part.q.shape[1] // stored.len.shape[1], kv.options["scale"]
    softcap, sinks = kv.options["softcap"], kv.options["sinks"]
    stop = (kv.k.shape[2] - part.stop).tolist()  # [B] number of last new columns that the rows do not see
    rows = torch.arange(part.q.shape[2], 0, -1, device=slots.device)
    for b, h, k in each_head(slots, "k"):
        mine, column = slice(h * group, (h + 1) * group), torch.arange(len(k), device=slots.device)
        x = _ops.softcapped(part.q[b, mine].float() @ k.float().T * scale, softcap)
        sees = column <= (len(k) - rows[:, None] if part.causal else len(k) - 1 - stop[b])
        if part.until is not None:
            position = slots.of_head(slots.positions, b, h)
            sees = position <= part.until[b] + 1 - rows[:, None]
        if part.unseen is not None:
            sees = sees & ~slots.of_head(slots.at(part.unseen), b, h)
        x = x.masked_fill(~sees, -torch.inf)
        if part.lse is not None:
            lse = part.lse[b, mine]
        else:
            every = x if sinks is None else torch.cat([x, sinks[mine, None, None].expand(-1, x.shape[1], 1)], -1)
            lse = every.logsumexp(-1)
        yield b, h, x, lse
