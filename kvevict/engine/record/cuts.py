"""What follows a recorded token: slots are evicted from its layers."""

from collections.abc import Callable
from dataclasses import replace
from operator import is_

import numpy as np
import torch

from ...policy.inputs import as_needs
from ...policy.policy import Policy
from ..read.layer import LayerCall, decide_later
from ..read.step import Step
from .calls import Calls

PATIENCE = 8  # tokens in a row with equal cuts before one is recorded


class Cuts:
    """The cuts after the tokens of one recording. Where each token evicts one slot of every head, as by h2o, streaming
    and tova, they are recorded, too: on a CPU. A GPU runs meanwhile what it was given before."""

    def __init__(self) -> None:
        self.equal = 0  # tokens in a row that left `state`
        self.state: tuple = ()
        self.carried: list = []  # the layers' carried numbers and remembered queries, written to in place
        self.replay: Callable[[], None] | None = None

    def after(self, step: Step, attended: list[LayerCall], positions: torch.Tensor) -> None:
        """Evict. attended: the token's layers, in memory that stays, as positions does."""
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
        if self.equal < PATIENCE or positions.device.type != "cpu" or not _repeats(step.plan.policy):
            decide_later(step, attended)
            self._note(layers, before)
            return
        with Calls() as calls:
            decide_later(step, attended)
        self._note(layers, before)
        if self.equal and calls.reads is None:
            self._record(calls, layers, carried)
        if self.replay is None:
            self.equal = -(2**30)  # not again in these places

    def _note(self, layers: list, before: tuple) -> None:
        """Whether a cut left what was there before its token, and what the one before left."""
        state = _state(layers, 0)
        self.equal = self.equal + 1 if before == state == self.state else 0
        self.state = state

    def _record(self, calls: Calls, layers: list, carried: list) -> None:
        """Cuts read and write the numbers `carried` from here on, where they lie."""
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
    """Whether cuts of equal counts compute the same from slots and rows: no number of the host goes into them."""
    parts = policy.score, policy.refine, policy.heads, policy.rows, *policy.selections
    own = all(type(part).__module__.startswith("kvevict.") for part in parts)
    plain = not policy.recall and not policy.keep_prompt
    return own and plain and {need.name for need in as_needs(policy.score.needs)} <= {"attention"}


def _state(layers: list, new: int) -> tuple:
    """The layers' counts without their newest `new` slots, and their budgets."""
    counts, budgets = (np.stack(each) for each in ([x.storage.counts for x in layers], [x.budget for x in layers]))
    return (counts - new).tobytes(), budgets.tobytes()


def _carried(layers: list) -> list[torch.Tensor | None]:
    return [each for layer in layers for each in (layer.carry, layer.decode_queries)]
