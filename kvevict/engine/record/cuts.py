"""The evictions after a recorded token."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from operator import is_

import numpy as np
import torch

from ...policy.inputs import as_needs
from ...policy.policy import Policy
from ..read.layer import LayerCall, decide_later
from ..read.step import Step
from .calls import Calls

PATIENCE = 8  # tokens in a row with equal cuts before a cut is recorded


class Cuts:
    """The cuts after the tokens of one recording. If each token evicts one slot of every head, as with h2o, streaming
    and tova, the cuts are recorded, too, on a CPU. On a GPU Python runs ahead of the work anyway."""

    def __init__(self) -> None:
        self.state: tuple = ()  # `_state` after the last cut
        self.equal = 0  # cuts in a row that left the same `_state` as before their token and as the cut before
        self.carried: list = []  # the layers' carried numbers and remembered queries, written to in place
        self.replay: Callable[[], None] | None = None

    def after(self, step: Step, attended: list[LayerCall], positions: torch.Tensor) -> None:
        """Cut the layers of a token, `attended`. Its tensors, and positions, are in the recording's memory."""
        layers, cache = [step.cache.layers[call.index] for call in attended], step.cache
        before, carried, step = _state(layers, 1), _carried(layers), replace(step, positions=positions)
        if self.replay is not None:
            if before == self.state and all(map(is_, carried, self.carried)):
                self.replay()
                for counts in cache.table.groups.values():
                    counts.host -= 1
                cache.table.room += 1
                cache.sequence.fix()
                return
            self.replay, self.equal = None, 0
        records = self.equal >= PATIENCE and positions.device.type == "cpu" and _repeats(step.plan.policy)
        with Calls() if records else nullcontext() as calls:
            decide_later(step, attended)
        state = _state(layers, 0)
        self.equal = self.equal + 1 if before == state == self.state else 0
        self.state = state
        if calls is None:
            return
        if self.equal and calls.reads is None:
            self._record(calls, layers, carried)
        if self.replay is None:
            self.equal = -(2**30)  # never record a cut of these slots

    def _record(self, calls: Calls, layers: list, carried: list) -> None:
        """Record a cut that read the tensors `carried`: replayed, it writes their new values to the same memory."""
        changed = [(old, new) for old, new in zip(carried, _carried(layers), strict=True) if new is not old]
        moves = [(old, new) for old, new in changed if old is not None and new is not None and old.shape == new.shape]
        if len(moves) < len(changed):
            return
        again = calls.again()

        def replay() -> None:
            again()
            write()

        def write() -> None:
            with torch.inference_mode():
                for old, new in moves:
                    old.copy_(new)

        write()
        for layer, carry, queries in zip(layers, carried[::2], carried[1::2], strict=True):
            layer.carry, layer.decode_queries = carry, queries
        self.carried, self.replay = carried, replay


def _repeats(policy: Policy) -> bool:
    """Whether cuts at equal counts run the same operators: no number on the host but counts goes into them."""
    parts = policy.score, policy.refine, policy.heads, policy.rows, *policy.selections
    own = all(type(part).__module__.startswith("kvevict.") for part in parts)
    plain = not policy.recall and not policy.keep_prompt
    return own and plain and {need.name for need in as_needs(policy.score.needs)} <= {"attention"}


def _state(layers: list, new: int) -> tuple:
    """The layers' slot counts, less `new`, and their budgets."""
    counts, budgets = (np.stack(each) for each in ([x.storage.counts for x in layers], [x.budget for x in layers]))
    return (counts - new).tobytes(), budgets.tobytes()


def _carried(layers: list) -> list[torch.Tensor | None]:
    return [each for layer in layers for each in (layer.carry, layer.decode_queries)]
