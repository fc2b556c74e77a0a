"""Recall's second choice: an answer's first tokens attend to the slots of all tokens, and then their rows, and the
prompt's last ones, choose among these (`Policy.recall_after`, METHODS section 13)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ... import _ops
from ...policy.seen.rows import Observation, Observers
from ..slots import archive, host
from ..slots.archive import Awaited
from ..slots.cache import EvictionLayer
from ..slots.sequence import Sequence
from . import evict
from .choosers import Chooser
from .layer import LayerCall
from .step import Step

ROWS = 16  # the prompt's last rows that choose with the answer's


class Asking(Chooser):
    """At a prompt's end `chooser` cuts the layers. Then, by `put_aside`, the answer attends to all slots."""

    def __init__(self, chooser: Chooser) -> None:
        self.chooser, self.errors = chooser, chooser.errors
        self.asked: list = []  # of each layer (itself, its plan, the fields of `Awaited` from `protected` on)

    held = property(lambda self: self.chooser.held)

    def layer(self, call: LayerCall) -> None:
        rows = call.rows.stored_rows(ROWS, call.step.plan.wants_outputs)
        skip = (rows.first - (rows.columns - rows.q.shape[2])).clamp_min(0)
        slots = call.slots
        self.asked.append((call.layer, call.step.plan, slots.protected, slots.bounds, skip, rows.q, rows.out))
        self.chooser.layer(call)

    def end(self, spans: Any, step: Step, hidden: torch.Tensor) -> None:
        self.chooser.end(spans, step, hidden)

    def put_aside(self) -> None:
        for layer, plan, *rest in self.asked:
            slots = plan.ranks.counts(layer).sum(1)
            archive.put_aside(layer, Awaited(slots, 0 * slots, *rest))


class Answered(Chooser):
    """A token of an answer that attends to all slots. After the first `count` tokens, its rows choose as many as the
    prompt's did, and those of the answer stay."""

    looks = False

    def __init__(self, sequence: Sequence, count: int) -> None:
        self.sequence, self.count = sequence, count
        self.calls: list[LayerCall] = []  # of the layers

    def takes(self, call: LayerCall) -> bool:
        call.layer.awaited = call.layer.awaited.with_row(call.q, call.out)
        self.calls.append(call)
        return False

    def end(self, spans: Any, step: Step, hidden: torch.Tensor) -> None:
        since = self.calls[0].layer.awaited.since
        if since.min() < self.count:
            return
        floor = self.sequence.floor  # no token of the answer is lost, so all of them may be taken back
        away = [call.layer for call in self.calls if call.layer.awaited.chosen is None]
        for layer in away:
            archive.append_last(layer)
        if away:
            self.sequence.archived = self.sequence.columns
        coming = iter(away)
        _come(next(coming, None))
        while self.calls:
            _come(next(coming, None))  # while this layer chooses
            _choose(self.calls.pop(0))
        self.sequence.floor = floor
        host.wait()


def _come(layer: EvictionLayer | None) -> None:
    """Begin to copy the slots of all tokens from the host's memory."""
    if layer is not None:
        archive.recall(layer, np.ones(len(layer.counts), bool))


def _choose(call: LayerCall) -> None:
    """Cut a layer, which has the slots of all tokens, after an answer's first tokens."""
    layer, plan = call.layer, call.step.plan
    awaited, layer.awaited = layer.awaited, None
    with call.step.meter.clock("evict"), layer.storage.here():
        if not layer.storage.far:
            layer.storage = layer.storage.whole()
        first, last = awaited.protected
        last = last + _ops.upload(awaited.since, last.device, torch.int32)
        call.slots = call.slots_of(plan.ranks.counts(layer), (first, last), awaited.bounds)
        alive = call.slots.alive
        slots = np.minimum(awaited.slots + awaited.since * plan.kv_heads, alive)
        if (slots < alive).any():
            rows = Observers(awaited.q, awaited.skip, call.rows.end, True, None, awaited.out)
            call.known["observation"] = Observation((rows,))
            evict.store(call, evict.choose(call, evict.ranked(call, evict.numbers(call).score), slots))
