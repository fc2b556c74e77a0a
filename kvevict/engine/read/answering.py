"""The choice of slots during an answer, for recall (`Policy.recall_after`, METHODS section 13). The answer's first
tokens attend to the slots of all tokens; then their rows, and the prompt's last rows, choose the slots that stay."""

import numpy as np
import torch

from ...ops import _ops
from ...policy.seen.rows import Observation, Observers
from ..memory import archive, host
from ..memory.awaited import Awaited
from ..memory.layer import EvictionLayer
from .choosers import Chooser, choose, store
from .layer import LayerCall
from .plan import Plan
from .step import Step

ROWS = 16  # number of the prompt's last rows that choose together with the answer's rows


class Asking(Chooser):
    """The chooser at the end of a prompt whose answer is to choose, too: cuts the layers as `chooser` does, and notes
    what the answer's choice will need."""

    def __init__(self, chooser: Chooser) -> None:
        self.chooser, self.errors = chooser, chooser.errors
        self.asked: list[tuple] = []  # for each layer: the layer, then the fields of its `Awaited` from `protected` on

    held = property(lambda self: self.chooser.held)

    def layer(self, call: LayerCall) -> None:
        rows = call.rows.stored_rows(ROWS, call.step.plan.wants_outputs)
        skip = (rows.first - (rows.columns - rows.q.shape[2])).clamp_min(0)
        slots = call.slots
        self.asked.append((call.layer, slots.protected, slots.bounds, skip, rows.q, rows.out, rows.lse))
        self.chooser.layer(call)

    def end(self, step: Step, hidden: torch.Tensor) -> None:
        self.chooser.end(step, hidden)

    def put_aside(self, plan: Plan) -> None:
        """Put each layer's chosen slots aside, so that the answer attends to the slots of all tokens."""
        for layer, *rest in self.asked:
            archive.put_aside(layer, Awaited([*range(len(layer.counts))], plan.ranks.counts(layer).sum(1), *rest))


class Answered(Chooser):
    """The chooser of an answer's tokens that attend to the slots of all tokens. After the first `Policy.answered`
    tokens, the answer's rows choose as many of the prompt's slots as were kept at the prompt's end. All slots of the
    answer stay."""

    looks = False

    def __init__(self) -> None:
        self.calls: list[LayerCall] = []

    def takes(self, call: LayerCall) -> bool:
        call.layer.awaited = call.layer.awaited.with_row(q=call.q, out=call.out, lse=call.lse)
        self.calls.append(call)
        return False

    def end(self, step: Step, hidden: torch.Tensor) -> None:
        sequence = step.cache.sequence
        assert sequence.since is not None
        sequence.since = since = np.where(sequence.since < 0, -1, sequence.since + 1)
        if since[since >= 0].min() < step.plan.policy.answered:
            return
        if (since < 0).any():
            raise ValueError(
                "some rows of the cache have chosen their slots, and others are about to: write the answers with "
                "kvevict.answer, or step through the rows apart with kvevict.answering.batch.Batch"
            )
        floor = sequence.floor  # restored below: the answer's slots all stay, so crop() may still remove any of them
        away = [call.layer for call in self.calls if call.layer.awaited.chosen is None]
        for layer in away:
            archive.append_last(layer)
        if away:
            sequence.archived = sequence.columns
        coming = iter(away)
        _come(next(coming, None))
        while self.calls:
            _come(next(coming, None))  # the next layer's slots arrive while this layer chooses
            _choose(self.calls.pop(0), since)
        sequence.floor, sequence.since = floor, None
        host.wait()


def _come(layer: EvictionLayer | None) -> None:
    """Start to copy the slots of all tokens of a layer from the host's memory to the layer's device."""
    if layer is not None:
        archive.recall(layer, np.ones(len(layer.counts), bool))


def _choose(call: LayerCall, since: np.ndarray) -> None:
    """Evict from a layer that holds the slots of all tokens. since: int [B] number of tokens of each row's answer."""
    layer, plan = call.layer, call.step.plan
    awaited, layer.awaited = layer.awaited, None
    with call.step.meter.clock("evict"), layer.storage.here():
        if not layer.storage.far:
            layer.storage = layer.storage.whole()
        first, last = awaited.protected
        last = last + _ops.upload(since, last.device, torch.int32)
        call.slots = call.slots_of(plan.ranks.counts(layer), (first, last), awaited.bounds)
        alive = call.slots.alive
        slots = np.minimum(awaited.slots + since * plan.kv_heads, alive)
        if (slots < alive).any():
            rows = Observers(awaited.q, awaited.skip, call.rows.end, True, awaited.lse, awaited.out)
            call.observation = Observation((rows,))
            store(call, choose(call, slots))
