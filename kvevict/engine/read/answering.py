"""Choices of slots during an answer, for recall (METHODS section 13). An answer's first tokens attend to the slots of
all tokens; then their rows, and the prompt's last rows, choose the slots that stay (`Policy.recall_after`). If the
policy evicts while decoding, a layer that exceeds its budget chooses from the slots of all tokens."""

from dataclasses import replace

import numpy as np
import torch

from ...ops import _ops
from ...policy.seen.rows import Observation, Observers
from ..memory.awaited import OF_ROWS, Awaited
from .choosers import Chooser, Deciding, choose, store
from .decisions import Decisions
from .layer import LayerCall
from .plan import Plan
from .step import Step

ROWS = 16  # number of the prompt's last rows that choose together with the answer's rows


class Asking(Chooser):
    """The chooser at the end of a prompt whose answer is to choose, too: cuts the layers as `chooser` does, and notes
    what the answer's choice will need."""

    def __init__(self, chooser: Chooser) -> None:
        self.chooser, self.errors = chooser, chooser.errors
        self.noted: list[tuple] = []  # for each layer: its call, then the fields of its `Awaited` from `protected` on

    held = property(lambda self: self.chooser.held)

    def layer(self, call: LayerCall) -> None:
        rows = call.rows.stored_rows(ROWS, call.step.plan.wants_outputs)
        skip = (rows.first - (rows.columns - rows.q.shape[2])).clamp_min(0)
        slots = call.slots
        self.noted.append((call.index, call.layer, slots.protected, slots.bounds, skip, rows.q, rows.out, rows.lse))
        self.chooser.layer(call)

    def end(self, step: Step, hidden: torch.Tensor) -> None:
        self.chooser.end(step, hidden)

    def asked(self, plan: Plan) -> dict[int, Awaited]:
        """Return what each layer has kept, after its cut."""
        return {index: Awaited(plan.ranks.counts(layer).sum(1), *rest) for index, layer, *rest in self.noted}


class Answered(Chooser):
    """The chooser of an answer's tokens that attend to the slots of all tokens. After the first `Policy.answered`
    tokens, the answer's rows choose as many of the prompt's slots as were kept at the prompt's end. All slots of the
    answer stay."""

    looks = False

    def __init__(self) -> None:
        self.calls: dict[int, LayerCall] = {}

    def token(self, call: LayerCall) -> None:
        self.calls[call.index] = call

    def end(self, step: Step, hidden: torch.Tensor) -> None:
        tiers, sequence = step.cache.tiers, step.cache.sequence
        # Copies, since the next token may overwrite the tensors of a recorded one
        rows = {index: {name: getattr(call, name).clone() for name in OF_ROWS} for index, call in self.calls.items()}
        tiers.follow(rows)
        since = tiers.since
        if since[since >= 0].min() < step.plan.policy.answered:
            return
        if (since < 0).any():
            raise ValueError(
                "some rows of the cache have chosen their slots, and others are about to: write the answers with "
                "kvevict.answer, or step through the rows apart with kvevict.answering.batch.Batch"
            )
        floor = sequence.floor  # restored below: the answer's slots all stay, so crop() may still remove any of them
        for index, asked in tiers.choose():
            _choose(self.calls.pop(index), asked, since)
        sequence.floor = floor


def _choose(call: LayerCall, asked: Awaited, since: np.ndarray) -> None:
    """Evict from a layer that holds the slots of all tokens. since: int [B] number of tokens of each row's answer."""
    layer, plan = call.layer, call.step.plan
    with call.step.meter.clock("evict"), layer.storage.here():
        if not layer.storage.far:
            layer.gather()
        first, last = asked.protected
        last = last + _ops.upload(since, last.device, torch.int32)
        call.slots = call.slots_of(plan.ranks.counts(layer), (first, last), asked.bounds)
        alive = call.slots.alive
        slots = np.minimum(asked.slots + since * plan.kv_heads, alive)
        if (slots < alive).any():
            rows = Observers(asked.q, asked.skip, call.rows.end, True, asked.lse, asked.out)
            call.observation = Observation((rows,))
            store(call, choose(call, slots))


class Recalling(Deciding):
    """The chooser of a decoded token with a policy that recalls and evicts while decoding. After the step, batch rows
    that lose slots of a layer choose from the slots of all tokens."""

    looks = True

    def __init__(self, decisions: Decisions) -> None:
        super().__init__(decisions)
        self.calls: list[LayerCall] = []

    def token(self, call: LayerCall) -> None:
        self.calls.append(call)

    def end(self, step: Step, hidden: torch.Tensor) -> None:
        tiers = step.cache.tiers
        for call in self.calls:
            if call.index in tiers.every:
                tiers.write(call.index, *call.new, call.step.positions, call.step.first, call.step.padding)
        calls, self.calls = self.calls, []
        while calls:  # a call that is done has the only reference to its layer's copies from the host
            super().token(calls.pop(0))

    def layer(self, call: LayerCall) -> None:
        slots, tiers = self.slots(call), call.step.cache.tiers
        if slots is not None and call.index in tiers.every:
            tiers.recall(call.index, slots < call.step.plan.ranks.counts(call.layer).sum(1))
            # The token's attention results are over the kept slots only, so they are dropped.
            call.probs, call.rows = None, replace(call.rows, out=None, lse=None)
        super().layer(call)
