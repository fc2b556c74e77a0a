"""Ops on remembered queries of decoded tokens, whose own slots may have been evicted because the policy's rows do not
protect them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...ops import _ops
from ...policy.inputs import Observers, Slots
from ...policy.seen.slots import REDUCE


def observed(
    op: Callable,
    slots: Slots,
    part: Observers,
    new: Sequence[torch.Tensor],
    more: Sequence[torch.Tensor],
    *,
    reduce: str = "sum",
    group: str = "mean",
    weight: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """Call an op as `quantities.observed` does, for the remembered queries part.q [B, H, R, D].

    The op takes causal rows for those of the last R alive slots, which is wrong if these tokens' slots are evicted. So
    each query becomes a batch row of its own (B * R rows), which sees the slots up to the query's position."""
    B, _, R, _ = part.q.shape
    stored = slots.kv.stored
    position = slots.positions[:, None]
    until = part.until - torch.arange(R - 1, -1, -1, device=slots.device)  # [B, R] the queries' positions
    sees = ((position >= 0) & (position <= until[..., None, None])).sum(-1).flatten(0, 1).to(torch.int32)
    sees = sees.expand(-1, stored.len.shape[1]).contiguous()  # latents (MLA): one count for all heads
    each = lambda x: x.transpose(1, 2).flatten(0, 1).unsqueeze(2)  # noqa: E731  [B, H, R, ..] -> [B * R, H, 1, ..]
    if op is _ops.peak:
        more = [torch.minimum(end.repeat_interleave(R, 0), sees) for end in more]
    else:
        options["group"] = "none"
    if op is _ops.score:
        options["reduce"] = "sum"
    if op is _ops.error:
        more = [more[0].flatten(0, 1).unsqueeze(1)]
        options["weight"] = None if weight is None else each(weight)
    none, new = sees.new_zeros(B * R), [x.repeat_interleave(R, 0) for x in new]
    options |= dict(lse=None, causal=False)
    centre = None if stored.centre is None else stored.centre.repeat_interleave(R, 0)
    offset, kinds = stored.offset.repeat_interleave(R, 0), (stored.k_kind, stored.v_kind)
    held = _ops.Held(stored.k, stored.v, None, offset, sees, centre, *kinds)  # type: ignore[arg-type]  # pos: not read
    out = op(each(part.q), none, held, *new, none, none, *more, **options)
    out = out.unflatten(0, (B, R))
    if op is _ops.peak:
        return out.squeeze(3).transpose(1, 2)
    out = REDUCE[reduce](out, 1)
    return out if group == "none" else REDUCE[group](out.unflatten(1, (stored.len.shape[1], -1)), 2)
