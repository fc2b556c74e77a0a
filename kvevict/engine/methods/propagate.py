"""Token-selective propagation (FastKV, Jo et al. 2025): layers after layer `tsp` read only a chunk's best tokens.

Layer `tsp` ranks the chunk's tokens by its pooled scores, summed over its kv heads. The observing rows are always
propagated, and so are the first tokens that are always kept: much attention goes to them, and without them the layers
after `tsp` lose most answers. A question before the text ranks before other tokens. Hooks cut the arguments of later
layers (hidden states, rotary embeddings, position ids, and the step that our attention reads) to the propagated tokens,
which keep their positions. Every layer counts all tokens as seen. Rows appended to a chunk go through all layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from ...context import current, enter
from ...models import families
from ...ops import _ops
from ..read.layer import LayerCall
from ..read.plan import Plan


class Onward(NamedTuple):
    """The tokens of a call that layers after layer `tsp` read: K columns of the call's rows."""

    columns: torch.Tensor  # [B, K] numbers of these columns, ascending; the columns of appended rows are last
    first: torch.Tensor  # [B] number of padding columns at the start of the K columns
    padding: np.ndarray  # [B] `first` on the host


def check(plan: Plan, tokens: int, wanted: int, flags: Sequence[str]) -> None:
    """Raise ValueError if layers after `tsp` do not read all rows that the caller wants of a chunk of `tokens` tokens:
    the last `wanted` rows (0: all), or, because of the outputs named in `flags`, every layer's rows."""
    policy = plan.policy
    if plan.tsp is None or tokens == policy.propagated(tokens):
        return
    fix = f"tsp=None, or tsp_len >= {tokens}"
    if flags:
        raise ValueError(f"{flags[0]}=True: layers after tsp={plan.tsp} do not read all tokens; pass {fix}")
    if not 1 <= wanted <= policy.goes_on:
        raise ValueError(
            f"{f'the last {wanted}' if wanted else 'all'} rows were asked for, but layers after tsp={plan.tsp} read "
            f"{policy.propagated(tokens)} of {tokens} tokens, among them the last {policy.goes_on}: pass "
            f"logits_to_keep=1, as generate does, or {fix}"
        )


def due(call: LayerCall) -> bool:
    """Whether the call is of layer `tsp`, and of a chunk with more tokens than later layers are to read."""
    step, tokens = call.step, int(call.tokens.max())
    return step.read is not None and call.index == step.plan.tsp and tokens > call.policy.propagated(tokens)


def choose(call: LayerCall, score: torch.Tensor) -> Onward:
    """Choose the tokens of a chunk that later layers read, by the score of layer `tsp`. All appended rows are read,
    too."""
    policy, slots, kv = call.policy, call.slots, call.slots.kv
    rows, device = kv.k.shape[2], call.slots.device
    tokens = rows - kv.first
    kept = policy.propagated(call.tokens)
    most, keep = int(kept.max()), _ops.upload(kept, device, torch.int32)
    last = slots.protected[1].clamp_min(policy.goes_on).minimum(keep)
    before = _ops.upload(call.layer.sequence.seen, device, torch.int32)
    first = slots.protected[0] - before  # number of the protected first slots that are in this chunk
    first = first.clamp_min(0).minimum(keep - last).to(torch.int32)
    column = torch.arange(rows, device=device)
    slot = (call.layer.len[..., None] + column).clamp_max(slots.columns - 1)  # slot number of each of the chunk's rows
    pooled = policy.score.pooled(slots, score).expand(-1, slot.shape[1], -1)  # a score may be [B, 1, C] for all heads
    if slots.bounds.kept is not None:
        pooled = pooled.masked_fill(slots.between, torch.inf)
    by_head = slots.heads.gather(pooled.gather(2, slot))
    worth = reduce(torch.add, by_head.unbind(1))  # added in head order, so that every machine gets the same sums
    with call.step.meter.clock("select"):
        chosen = _ops.select(worth[:, None], tokens[:, None], keep[:, None], first, last, most)[:, 0]
    padding = most - keep
    rank = column[:most] - padding[:, None]
    columns = chosen.gather(1, rank.clamp_min(0)) + kv.first[:, None]
    # A batch row with fewer tokens than the others keeps all of them, with padding at their left.
    columns = torch.where(rank < 0, column[:most], columns)
    appended = rows + torch.arange(call.step.appended, device=device).expand(len(columns), -1)
    return Onward(torch.cat([columns, appended], 1), padding, most - kept)


def install(decoder: torch.nn.Module) -> list[RemovableHandle]:
    """Add hooks to the decoder's layers. A hook refers only to the number of its layer, so copies of the model are
    independent."""
    layers = enumerate(families.layers_of(decoder))
    return [layer.register_forward_pre_hook(partial(_enter, index), with_kwargs=True) for index, layer in layers]


def _enter(index: int, module: torch.nn.Module, args: tuple, kwargs: dict) -> tuple | None:
    """Cut a layer's arguments to the propagated tokens: in every layer after `tsp` those that all layers get, and in
    the first one also the hidden states, which later layers then get already cut."""
    step = current()
    onward = step.chooser.onward if step is not None and step.chooser is not None else None
    if onward is None:
        return None
    rows = kwargs["position_ids"].shape[-1]
    if index == step.plan.tsp + 1:
        args = (_taken(args[0], onward.columns), *args[1:])
        positions = _taken(step.positions, onward.columns)
        first = onward.first.to(step.first.device)
        enter(step=replace(step, positions=positions, first=first, padding=onward.padding))
    return args, {name: cut(each, rows, partial(_taken, columns=onward.columns)) for name, each in kwargs.items()}


def _taken(x: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Gather the columns [B, K] of x [B or 1, T, ...], on the device of x: [B, K, ...]."""
    columns = columns.to(x.device)
    row = torch.arange(columns.shape[0], device=x.device)[:, None]
    return x.expand(len(row), *x.shape[1:])[row, columns]


def cut(value: object, rows: int, part: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply `part` to a tensor [B or 1, rows, ...], or to each such tensor in a tuple or list; return any other value
    unchanged."""
    if isinstance(value, (tuple, list)):
        return type(value)(cut(each, rows, part) for each in value)
    if isinstance(value, torch.Tensor) and value.ndim > 1 and value.shape[1] == rows:
        return part(value)
    return value
