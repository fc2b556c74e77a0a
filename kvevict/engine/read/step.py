"""What the attention function knows of a running call of the decoder: the `Read` of a prompt, the `Step` of a chunk."""

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
from ..memory.layer import EvictionLayer
from ..memory.meter import Meter
from ..memory.storage import ROOM, ROOM_TO_REPLAY
from . import schedule
from .budgets import Budgets
from .plan import Plan

OF_EVERY_TOKEN = "output_hidden_states", "output_router_logits"  # options of a call for outputs of every token

_thread = threading.local()  # `_thread.paused`: a driver's `pause` runs in this thread


def paused(pause: Callable[[], None]) -> None:
    """Call a driver's `pause` before a layer of a prompt's chunk. `pause` may decode tokens of other caches, but may
    not read a prompt."""
    _thread.paused = True
    try:
        pause()
    finally:
        _thread.paused = False


@dataclass
class OuterCall:
    """A call of the model that calls the decoder."""

    model: Any  # the model that was called; None: the decoder was called directly
    mask: Any  # the caller's attention_mask
    wanted: int  # number of last tokens whose logits, or hidden states, the caller uses; 0: all
    spans: Any = None  # the kvevict.engine.read.spans.Spans of the decoder's call; `settle` ends it after the model's


@dataclass(frozen=True, eq=False)
class Read:
    """The reading of one prompt, in chunks."""

    prompt: int  # number of the prompt's columns, padding included
    tokens: np.ndarray  # [B] number of the prompt's tokens, without padding
    rows: Rows  # says which rows observe: the policy's `Rows`, or one for the question found in the prompt
    budgets: Budgets
    prepared: Any = None  # result of `Rows.prepare` for the prompt
    watchers: tuple = ()  # kvevict.engine.watch.watcher.Watcher objects
    memory: dict[int, Any] = field(default_factory=dict)  # layer -> last result of `Rows.accumulate`
    numbers: dict[int, torch.Tensor] = field(default_factory=dict)  # layer -> largest scores over the repeated parts

    policy = property(lambda self: self.budgets.policy)
    seen = property(lambda self: self.budgets.seen)  # number of tokens read in each batch row, this prompt included
    evicts = property(lambda self: schedule.evicts(self.policy, self.seen))


@dataclass(frozen=True, eq=False, kw_only=True)
class Step(CallRows):
    """One pass through the decoder's layers: of a chunk, of tokens after a prompt, or of a decoded token."""

    plan: Plan
    decoder: Any  # the text decoder that runs
    cache: Any  # the EvictionCache
    meter: Meter
    inputs: dict[str, Any]  # arguments of the decoder's forward
    chooser: Any = None  # the kvevict.engine.read.choosers.Chooser that evicts; None: all slots stay
    extra: AppendedRows | None = None  # rows that are read with the chunk and not stored
    ahead: int = 0  # number of rows in the prompt's later chunks, appended rows included
    final_position: int | None = None  # the prompt's largest position, if rotary frequencies depend on it
    hidden: dict[int, torch.Tensor] = field(default_factory=dict)  # layer -> input of its attention block, if needed
    unread: dict[int, Any] = field(default_factory=dict)  # layer -> its LayerCall, while other layers read its slots
    attended: list | None = None  # LayerCalls of a recorded token, whose cuts come after the step; None: cut at once

    # int32 [B, 2] positions (start, stop) that the rows of `extra` do not attend to; None: there are none
    unseen = property(lambda self: None if self.extra is None else self.extra.unseen)
    rows = property(lambda self: self.plan.policy.rows if self.read is None else self.read.rows)  # `Rows` that observe
    watchers = property(lambda self: () if self.read is None else self.read.watchers)  # there are none while decoding

    @cached_property
    def unseen_columns(self) -> torch.Tensor:
        """int32 [2, B]: number of the chunk's columns with positions before the start of `unseen`, and number of those
        before its stop."""
        chunk = self.positions.shape[1] - self.appended
        valid = torch.arange(chunk, device=self.first.device) >= self.first[:, None]
        return ((self.positions[:, :chunk] < self.unseen.T[..., None]) & valid).sum(-1, dtype=torch.int32)

    def on(self, device: torch.device) -> Step:
        """Return this step with `positions`, `first` and `unseen` on `device`, for layers that compute on it."""
        if self.positions.device == device:
            return self
        if device not in self._elsewhere:
            extra = self.extra
            if extra is not None and extra.unseen is not None:
                extra = replace(extra, unseen=extra.unseen.to(device))
            positions, first = self.positions.to(device), self.first.to(device)
            self._elsewhere[device] = replace(self, positions=positions, first=first, extra=extra)
        return self._elsewhere[device]

    @cached_property
    def _elsewhere(self) -> dict[torch.device, Step]:
        return {}

    def through(self, run: Callable[..., Any]) -> Any:
        """Run the decoder's forward `run`, and count the step's columns as read. Rows of `extra` are cut from the
        output."""
        assert self.decoding or not getattr(_thread, "paused", False), "a prompt is read inside another's forward"
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
        """Copy a fork's shared slots in layers where this step cannot read them in place, and count the slots of a
        decoded token."""
        layers = [self.cache.layers[index] for index in self.plan.order]
        for layer in layers:
            if layer.storage.prefix is not None and self._needs_copy(layer):
                layer.gather()
        if self.decoding:
            self.cache.tick(layers, ROOM_TO_REPLAY if self.plan.records(self.positions.device) else ROOM)

    def bring(self, order: int) -> None:
        """Bring the slots of the evicting layer number `order`, which is about to attend in a chunk, into one buffer on
        its device. Copies of the next layer's slots from the host's memory begin, too, and arrive while this layer
        computes, unless layers wait for their cuts: then the device also has to hold the slots of a waiting layer."""
        layers = [self.cache.layers[index] for index in self.plan.order]
        for layer in layers[order : order + (1 if self.chooser.held else 2)]:
            layer.storage.fetch()
        if layers[order].storage.in_parts and not layers[order].storage.far:
            layers[order].gather()

    def _needs_copy(self, layer: EvictionLayer) -> bool:
        """True if this step needs all slots of a forked layer in one buffer from the start, because choosers, layers
        that read another layer's slots, and layers that are cut several times (CAKE) see only the buffer of the slots
        appended to the fork. Otherwise `bring` copies a chunk's slots one layer at a time."""
        if self.plan.readers or (self.plan.policy.layers.cascades and not self.decoding):
            return True
        looks = self.chooser is not None and self.chooser.looks
        return self.decoding and (looks or not layer.decodes_after_prefix or layer.storage.far)


def span(
    arguments: Any, start: int, end: int, meter: Meter, chooser: Any, read: Read | None = None,
    chunk: Chunk | None = None, ahead: int = 0,
) -> Step:  # fmt: skip
    """Make the `Step` of columns start .. end-1 of a call's `Arguments`, and of the rows appended to the chunk."""
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
