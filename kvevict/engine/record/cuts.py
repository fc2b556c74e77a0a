"""The evictions ("cuts") after each token of a recording, and recordings of these evictions."""

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

PATIENCE = 8  # number of consecutive tokens with equal cuts before a cut is recorded


class Cuts:
    """The cuts after the tokens of one recording. On a CPU, a cut is recorded as well if each token evicts one slot of
    every head, as with h2o, streaming and tova. On a GPU there is no need, since Python runs ahead of the device."""

    def __init__(self) -> None:
        self.state: tuple = ()  # result of `_state` after the last cut
        self.equal = 0  # number of cuts in a row after each of which `_state` was the same as before its token
        self.carried: list = []  # the layers' carried scores and remembered queries, which a replay overwrites
        self.replay: Callable[[], None] | None = None

    def after(self, step: Step, attended: list[LayerCall], positions: torch.Tensor) -> None:
        """Evict slots of all layers after a token. attended: the token's call in each layer; its tensors and
        `positions` are in the recording's memory."""
        layers, cache = [step.cache.layers[call.index] for call in attended], step.cache
        before, carried, step = _state(layers, 1), _carried(layers), replace(step, positions=positions)
        if self.replay is not None:
            if before == self.state and all(map(is_, carried, self.carried)):
                self.replay()
                for counts in cache.table.groups.values():
                    counts.host -= 1
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
        """Make a cut that was noted in `calls` repeatable. carried: the layers' carried scores and remembered queries
        before the cut; a replay writes the new values over the old ones."""
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
    """Whether any two cuts at equal slot counts run the same operators, because no other number on the host influences
    a cut."""
    parts = policy.score, policy.refine, policy.heads, policy.rows, *policy.selections
    own = all(type(part).__module__.startswith("kvevict.") for part in parts)
    plain = not policy.recall and not policy.keep_prompt
    return own and plain and {need.name for need in as_needs(policy.score.needs)} <= {"attention"}


def _state(layers: list, new: int) -> tuple:
    """Return the layers' slot counts minus `new`, and the layers' budgets, both as bytes to be compared."""
    counts, budgets = (np.stack(each) for each in ([x.storage.counts for x in layers], [x.budget for x in layers]))
    return (counts - new).tobytes(), budgets.tobytes()


def _carried(layers: list) -> list[torch.Tensor | None]:
    return [each for layer in layers for each in (layer.carry, layer.decode_queries)]
