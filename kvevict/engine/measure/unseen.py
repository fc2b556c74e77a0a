"""Attention of rows that do not see some of the slots: neither a question's copies nor the rows that observe see the
question before a text."""

from typing import Any

import torch

from ...ops import _ops
from ...policy.seen.rows import Observers
from ...policy.seen.slots import Slots


def attend(
    step: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, held: Any, longest: int, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [B, T, H, D], lse [B, H, T]) of the rows of a step. Its appended rows do not see its `unseen` positions.

    step     a `kvevict.engine.read.step.Step`
    q        [B, H, T, D], with k and v [B, heads, S, D] the call's rows; held: the stored slots, with their positions
    longest  stored slots of the fullest head
    options  scale, softcap, sinks of attention
    """
    if step.unseen is None:
        return _ops.attend(q, held, k, v, step.first, **options)
    rows, chunk = step.appended, k.shape[2] - step.appended
    at = torch.arange(longest, device=q.device)
    stored = held.pos[(held.offset[..., None] + at).clamp_max(len(held.pos) - 1)]
    old = (stored < step.unseen.T[..., None, None]) & (at < held.len[..., None])  # [2, B, heads, longest]
    (before, new), (after, end) = _around(held, *zip(old.sum(-1, dtype=torch.int32), step.unseen_columns, strict=True))
    begin, kv, q_appended = step.first.clamp_max(chunk), (k[:, :, :chunk], v[:, :, :chunk]), q[:, :, -rows:]
    out, lse = _ops.attend(q[:, :, :-rows], held, *kv, begin, **options)
    more, more_lse = _joined(
        _ops.attend(q_appended, before, *kv, begin, stop=begin + new, **_without_sinks(options)),
        _ops.attend(q_appended, after, k, v, step.first + end, **options),
    )
    return torch.cat([out, more], 1), torch.cat([lse, more_lse], 2)


def observe(part: Observers, slots: Slots) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [B, R, H, D], lse [B, H, R]) of observers over the slots that they see: those at `unseen` are left out."""
    kv, stop = slots.kv, part.stop.to(torch.int32)

    def split(count: torch.Tensor) -> tuple:
        old = torch.minimum(count, kv.stored.len)  # the stored slots are a head's first
        return old, (count - old)[:, 0]

    (before, begin), (after, end) = _around(kv.stored, *map(split, slots.around(part.unseen)))
    begin, end = torch.minimum(kv.first + begin, stop), torch.minimum(kv.first + end, stop)
    return _joined(
        _ops.attend(part.q, before, kv.k, kv.v, kv.first, stop=begin, **_without_sinks(kv.options)),
        _ops.attend(part.q, after, kv.k, kv.v, end, stop=stop, **kv.options),
    )


def _around(held: Any, start: tuple, stop: tuple) -> tuple:
    """The stored slots before and after a span, each with the number of new columns before the span's start and before
    its stop. start, stop: how many stored slots of each head, int32 [B, heads], and new columns, int32 [B], are before
    it."""
    (old, new), (old_end, new_end) = start, stop
    return (held.within(0, old), new), (held.within(old_end, held.len - old_end), new_end)


def _without_sinks(options: dict[str, Any]) -> dict[str, Any]:
    """Options of one part of an attention whose other part has the sinks."""
    return options | dict(sinks=None)


def _joined(one: tuple, other: tuple) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of attention over the slots of both parts, each an (out [B, R, H, D], lse [B, H, R]) over its own."""
    (out, lse), (more, more_lse) = one, other
    share = (more_lse - lse).sigmoid().nan_to_num(0)  # a row of padding alone sees nothing: -inf less -inf
    joined = torch.lerp(out.float(), more.float(), share.transpose(1, 2)[..., None])
    return joined.to(out.dtype), torch.logaddexp(lse, more_lse)
