"""Attention of a chunk's rows, of which appended ones may not see some of the slots: a question's copies do not see the
question before a text."""

from typing import Any

import torch

from ... import _ops
from .step import Step


def attend(
    step: Step, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, held: Any, longest: int, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [B, T, H, D], lse [B, H, T]) of the rows of a step. Its appended rows do not see its `unseen` positions.

    q        [B, H, T, D], with k and v [B, heads, S, D] the call's rows; held: the stored slots, with their positions
    longest  stored slots of the fullest head
    options  scale, softcap, sinks of attention
    """
    out, lse = _ops.attend(q, held, k, v, step.first, **options)
    if step.unseen is not None:
        _attend_apart(step, q, k, v, held, longest, options, out, lse)
    return out, lse


def _attend_apart(step, q, k, v, held, longest, options, out, lse) -> None:
    """Write the attention of the appended rows into out and lse, joined from that over the slots before the unseen
    positions and that over the slots after them."""
    rows, first = step.appended, step.first
    start, stop = step.unseen.unbind(1)
    (old, new), (old_end, new_end) = (_below(step, held, longest, limit) for limit in (start, stop))
    before, after = held.within(0, old), held.within(old_end, held.len - old_end)
    q, chunk = q[:, :, -rows:], k.shape[2] - rows
    begin = first.clamp_max(chunk)  # a row of padding alone
    parts = (
        _ops.attend(q, before, k[:, :, :chunk], v[:, :, :chunk], begin, stop=begin + new, **options | dict(sinks=None)),
        _ops.attend(q, after, k, v, first + new_end, **options),
    )
    total = torch.logaddexp(*(lse for _, lse in parts))
    # A row of padding alone sees nothing: -inf less -inf.
    shares = [(part - total).exp().nan_to_num(0).transpose(1, 2)[..., None] for _, part in parts]
    out[:, -rows:] = sum(share * x.float() for share, (x, _) in zip(shares, parts, strict=True)).to(out.dtype)
    lse[:, :, -rows:] = total


def _below(step, held, longest: int, limit) -> tuple:
    """How many stored slots of each head, int32 [B, heads], and stored rows of the call, int32 [B], have positions
    below limit [B]."""
    at = torch.arange(longest, device=limit.device)
    stored = held.pos[(held.offset[..., None] + at).clamp_max(len(held.pos) - 1)] if longest else at
    old = ((stored < limit[:, None, None]) & (at < held.len[..., None])).sum(-1)
    columns = torch.arange(step.positions.shape[1] - step.appended, device=limit.device)
    new = (step.positions[:, : len(columns)] < limit[:, None]) & (columns >= step.first[:, None])
    return old.to(torch.int32), new.sum(1).to(torch.int32)
