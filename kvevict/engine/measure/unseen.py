"""Attention of rows to which some slots are hidden. If a question stands before a text, neither the copies of the
question that are appended to each chunk nor the observing rows see the slots of the question itself."""

from typing import Any

import torch

from ...ops import _ops
from ...policy.seen.rows import Observers
from ...policy.seen.slots import Slots


def attend(
    step: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, held: _ops.Held, longest: int, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with the rows of a step, a `kvevict.engine.read.step.Step`: (out [B, T, H, D], lse [B, H, T]). Rows
    appended to a chunk do not see slots at the positions `step.unseen`.

    q, k, v  queries [B, H, T, D], new keys and values [B, heads, S, D]
    held     the layer's stored slots, with their positions
    longest  number of stored slots of the fullest head
    options  scale, softcap, sinks of attention
    """
    if step.unseen is None:
        return _ops.attend(q, held, k, v, step.first, **options)
    rows, chunk = step.appended, k.shape[2] - step.appended
    at = torch.arange(longest, device=q.device)
    stored = held.pos[(held.offset[..., None] + at).clamp_max(len(held.pos) - 1)]
    old = (stored < step.unseen.T[..., None, None]) & (at < held.len[..., None])  # [2, B, heads, longest]
    before, after = _around(held, *old.sum(-1, dtype=torch.int32))
    new, end = step.unseen_columns
    begin, kv, q_appended = step.first.clamp_max(chunk), (k[:, :, :chunk], v[:, :, :chunk]), q[:, :, -rows:]
    out, lse = _ops.attend(q[:, :, :-rows], held, *kv, begin, **options)
    more, more_lse = _joined(
        _ops.attend(q_appended, before, *kv, begin, stop=begin + new, **options | dict(sinks=None)),
        _ops.attend(q_appended, after, k, v, step.first + end, **options),
    )
    return torch.cat([out, more], 1), torch.cat([lse, more_lse], 2)


def observe(part: Observers, slots: Slots) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with the queries of `part` to all slots but those at the positions `part.unseen`: (out [B, R, H, D], lse
    [B, H, R])."""
    kv, stop = slots.kv, part.stop.to(torch.int32)

    counts = slots.around(part.unseen)
    # The number of stored slots among a head's first `count` slots, since its new slots come after its stored ones
    old = [torch.minimum(count, kv.stored.len) for count in counts]
    new = [(count - stored)[:, 0] for count, stored in zip(counts, old, strict=True)]
    before, after = _around(kv.stored, *old)
    begin, end = (torch.minimum(kv.first + count, stop) for count in new)
    return _joined(
        _ops.attend(part.q, before, kv.k, kv.v, kv.first, stop=begin, **kv.options | dict(sinks=None)),
        _ops.attend(part.q, after, kv.k, kv.v, end, stop=stop, **kv.options),
    )


def _around(held: _ops.Held, start: torch.Tensor, stop: torch.Tensor) -> tuple[_ops.Held, _ops.Held]:
    """Return the stored slots before the slots start .. stop - 1 of each head, and those after them. start, stop: int32
    [B, heads]."""
    return held.within(0, start), held.within(stop, held.len - stop)


def _joined(one: tuple, other: tuple) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge two attention results (out [B, R, H, D], lse [B, H, R]) over disjoint slots into the result over all of
    them. Only one of the two may include attention sinks."""
    (out, lse), (more, more_lse) = one, other
    share = (more_lse - lse).sigmoid().nan_to_num(0)  # a row that sees no slot: -inf - -inf is NaN
    joined = torch.lerp(out.float(), more.float(), share.transpose(1, 2)[..., None])
    return joined.to(out.dtype), torch.logaddexp(lse, more_lse)
