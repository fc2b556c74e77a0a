"""The running call, as the decoder wrapper describes it to the attention function."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ...context import enter
from ...models import rotary
from ...policy.rows import AppendedRows, Rows
from ...policy.seen.rows import CallRows, Chunk
from ..memory.meter import Meter
from ..memory.storage import ROOM, ROOM_TO_REPLAY
from . import schedule
from .budgets import Budgets
from .plan import Plan

OF_EVERY_TOKEN = "output_hidden_states", "output_router_logits"  # options of a call for outputs of every token


class _Thread(threading.local):
    paused = False  # a driver's `pause` runs: tokens may be decoded, and no prompt read inside another's forward


_thread = _Thread()


def paused(pause: Callable[[], None]) -> None:
    """Let the driver go on with others' tokens, before a layer."""
    _thread.paused = True
    try:
        pause()
    finally:
        _thread.paused = False


@dataclass
class OuterCall:
    """A call of the model around the decoder."""

    model: Any
    mask: Any  # the caller's attention_mask
    wanted: int  # number of last tokens with logits; 0: all
    spans: Any = None  # the kvevict.engine.read.spans.Spans of the decoder's call in it, to be settled


@dataclass(frozen=True, eq=False)
class Read:
    """One reading of a prompt."""

    prompt: int  # columns of the prompt, padding included
    tokens: np.ndarray  # [B] valid tokens of the prompt
    rows: Rows  # the policy's rows, or those for tokens chosen by the caller
    budgets: Budgets  # of its layers
    prepared: Any = None  # result of `Rows.prepare` for the prompt
    watchers: tuple = ()  # of kvevict.engine.watch.watcher
    memory: dict = field(default_factory=dict)  # layer -> memory of its rows from chunk to chunk
    numbers: dict = field(default_factory=dict)  # layer -> its slots' numbers by the parts repeated so far

    policy = property(lambda self: self.budgets.policy)
    seen = property(lambda self: self.budgets.seen)  # per row token count after the read, over all prompts
    evicts = property(lambda self: schedule.evicts(self.policy, self.seen))


@dataclass(frozen=True, eq=False, kw_only=True)
class Step(CallRows):
    """One call of the decoder: a chunk, tokens after a prompt, or a decoded token."""

    plan: Plan
    decoder: Any  # the text decoder that runs
    cache: Any
    meter: Meter
    inputs: dict  # of the decoder's forward
    chooser: Any = None  # the kvevict.engine.read.choosers.Chooser of survivors; None: all slots stay
    extra: AppendedRows | None = None  # the rows that are read with the chunk and not stored
    ahead: int = 0  # rows of the prompt's later chunks, appended ones included
    final_position: int | None = None  # the prompt's largest position, for rotary frequencies that depend on it
    hidden: dict = field(default_factory=dict)  # layer -> input of its attention block, if wanted
    unread: dict = field(default_factory=dict)  # layer -> its LayerCall, while other layers still read its slots
    attended: list | None = None  # of a token that is recorded: the LayerCalls to decide later; None: at once

    unseen = property(lambda self: None if self.extra is None else self.extra.unseen)  # by the extra rows
    rows = property(lambda self: self.plan.policy.rows if self.read is None else self.read.rows)  # `Rows` that observe
    watchers = property(lambda self: () if self.read is None else self.read.watchers)  # none while decoding

    @cached_property
    def unseen_columns(self) -> torch.Tensor:
        """int32 [2, B] how many of the chunk's columns have positions before `unseen`'s start, and before its stop."""
        chunk = self.positions.shape[1] - self.appended
        valid = torch.arange(chunk, device=self.first.device) >= self.first[:, None]
        return ((self.positions[:, :chunk] < self.unseen.T[..., None]) & valid).sum(-1, dtype=torch.int32)

    def on(self, device: torch.device) -> Step:
        """This step for layers that compute on `device`, with `positions` and `first` there."""
        if self.positions.device == device:
            return self
        if device not in self._elsewhere:
            there: dict[str, Any] = dict(positions=self.positions.to(device), first=self.first.to(device))
            if self.extra is not None and self.extra.unseen is not None:
                there["extra"] = replace(self.extra, unseen=self.extra.unseen.to(device))
            self._elsewhere[device] = replace(self, **there)
        return self._elsewhere[device]

    @cached_property
    def _elsewhere(self) -> dict:
        """Results of `on`."""
        return {}

    def through(self, run: Callable[..., Any]) -> Any:
        """The decoder's output, of its forward `run`, for this step without the extra rows; its columns then count as
        read."""
        assert self.decoding or not _thread.paused, "a prompt is read inside another's forward"
        enter(step=self)
        self._ready()
        columns = self.positions.shape[1] - self.appended
        self.cache.sequence.coming = columns, columns - np.minimum(self.padding, columns)
        with contextlib.nullcontext() if self.extra is None else self.extra.adapted(self.decoder):
            output = run(**self.inputs)
        self.cache.sequence.advance()
        if self.appended:
            output.last_hidden_state = output.last_hidden_state[:, : -self.appended]
        return output

    def _ready(self) -> None:
        """Forks that this step may not read in place get slots of their own, and a decoded token is counted."""
        layers = [self.cache.layers[index] for index in self.plan.order]
        for layer in layers:
            if layer.storage.prefix is not None and self._needs_whole(layer):
                layer.storage = layer.storage.whole()
        if self.decoding:
            self.cache.tick(layers, ROOM_TO_REPLAY if self.plan.run.compiled else ROOM)

    def _needs_whole(self, layer: Any) -> bool:
        """True if the step needs all slots of a fork in one place that no other fork reads. A chooser and layers that
        read another layer's slots look at the columns appended to a fork; CAKE's layers do so within the call of a
        chunk. Else a chunk's layers get them as they attend, one after the other."""
        if self.plan.readers or (self.plan.policy.layers.cascades and not self.decoding):
            return True
        looks = self.chooser is not None and self.chooser.looks
        return self.decoding and (looks or not layer.decodes_after_prefix or layer.storage.far)


def span(
    arguments: Any, start: int, end: int, meter: Meter, chooser: Any, read: Read | None = None,
    chunk: Chunk | None = None, ahead: int = 0,
) -> Step:  # fmt: skip
    """The `Step` of columns start .. end-1 of a call, by its `kvevict.engine.hook.arguments.Arguments`, with the rows
    that are appended to a chunk."""
    extra = None
    if read is not None and chunk is not None and chunk.appended:
        extra = read.rows.rows_for(chunk, arguments, read)
    positions = arguments.positions()[:, start:end]
    if extra is not None:
        after = extra.positions
        if after is None:
            after = positions[:, -1:] + 1 + torch.arange(chunk.appended, device=arguments.device)
        positions = torch.cat([positions, after], 1)
    rows, positions = positions.shape[1], positions.to(torch.int32).contiguous()
    inputs = arguments.inputs(start, end, extra)
    inputs["position_ids"] = arguments.places.chunk(start, end, positions.long())
    final = int(arguments.positions().max()) if rotary.rope_depends_on_length(arguments.decoder) else None
    return Step(
        plan=arguments.plan, decoder=arguments.decoder, cache=arguments.cache, meter=meter, positions=positions,
        padding=np.clip(arguments.padding - start, 0, rows), inputs=inputs, read=read, chunk=chunk,
        first=(arguments.first - start).clamp(0, rows).to(torch.int32), chooser=chooser, extra=extra, ahead=ahead,
        final_position=final,
    )  # fmt: skip
