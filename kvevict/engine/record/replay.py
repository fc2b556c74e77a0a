"""Decoded tokens without Python: the decoder's step is recorded once (calls.py) and then replayed.

A step can be recorded if Python reads no number from a tensor, and if two tokens call the same operators, with the same
numbers, on tensors at the same addresses: then all that differs from token to token is in tensors that are not moved.
Two tokens are compared once for each plan; obstacles.py has the reasons that are known without them.
"""

import threading
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from ...context import enter
from ..memory.storage import Storage
from ..read.layer import LayerCall, decide_later
from ..read.plan import Plan
from ..read.step import Step
from . import obstacles
from .calls import PATIENCE, RECORDERS, Calls
from .cuts import Cuts
from .obstacles import Inputs
from .places import Places


class Replay:
    """The recorded step of `places.size` batch rows, with copies of its inputs, and its output. It serves every cache
    whose slots lie in the buffers of `places`, and refers to none, so that a cache's memory is free once the caller
    drops it."""

    def __init__(self, step: Step, inputs: Inputs, places: Places) -> None:
        self.decoder, self.plan, self.places, self.ends = step.decoder, step.plan, places, ends(step)
        self.table = 0  # number of the `Table` whose slots' places were copied last
        self.lock = threading.Lock()  # held while a step runs
        with torch.inference_mode(False):  # a cache filled in inference mode is decoded outside of it, too
            self.positions = self._sized(step.positions)
            self.inputs = {name: self._sized(x) if isinstance(x, Tensor) else x for name, x in inputs.items()}
        self.watched: list[Calls] = []
        self.patience = PATIENCE[self.positions.device.type]  # not used up by beams, which move slots with each token
        self.kind: type = ModelOutput  # the class of the decoder's output
        self.fields: dict[str, Tensor | None] = {}  # of that output; None: the cache
        self.cuts = Cuts()
        # Each layer's call for the last token, whose tensors lie in the recording's memory.
        self.attended: list[LayerCall] = []
        self.replay: Callable[[], None] | None = None

    def _sized(self, x: Tensor) -> Tensor:
        return x.new_zeros(self.places.size, *x.shape[1:]) if self.places.pads and len(x) > 1 else x.clone()

    def serves(self, step: Step, inputs: Inputs, storages: list[Storage], sizes: set) -> bool:
        """Whether this recording, if its number of batch rows is one of `sizes`, can compute a step with these inputs
        over these layers' slots."""
        own = not is_bound(step.plan) or step.cache.table.number == self.table
        return own and self.places.size in sizes and self._is_of(step, inputs) and self.places.fits(storages)

    def goes_on(self, step: Step, inputs: Inputs) -> bool:
        """Whether this step is a later token on the slots of the last one."""
        return step.cache.table.number == self.table and self._is_of(step, inputs)

    def _is_of(self, step: Step, inputs: Inputs) -> bool:
        """Whether the step is the recorded one but for its slots and the numbers in its inputs."""
        same = step.decoder is self.decoder and step.plan is self.plan and self.ends == ends(step)
        return same and self._alike(inputs)

    def _alike(self, inputs: Inputs) -> bool:
        """Whether these inputs are the recorded ones but for the tensors' numbers, and, with padding, their rows."""
        pads, pairs = self.places.pads, zip(inputs.values(), self.inputs.values(), strict=False)
        return inputs.keys() == self.inputs.keys() and all(_alike(x, known, pads) for x, known in pairs)

    def step(self, step: Step, run: Callable[[Inputs], ModelOutput], inputs: Inputs) -> ModelOutput:
        """The decoder's output for one more token. run: its forward, from the inputs."""
        table, rows = step.cache.table, len(step.positions)
        if table.number != self.table:
            self.places.take(storages_of(step))
            self.table = table.number
        self.places.tick(table)
        self.positions[:rows].copy_(step.positions)
        for name, x in inputs.items():
            if isinstance(x, Tensor):
                known = self.inputs[name]
                (known if known.shape == x.shape else known[: len(x)]).copy_(x)
        output = self._output(step, run)
        if rows < self.places.size:
            output = type(output)(**{name: _first(x, rows) for name, x in output.items()})
        if self.replay is not None and self.attended and is_bound(self.plan):
            self.cuts.after(step, self.attended, self.positions)
        else:
            decide_later(step, self.attended)
        return output

    def _output(self, step: Step, run: Callable[[Inputs], ModelOutput]) -> ModelOutput:
        """The decoder's output for all batch rows, before slots are evicted."""
        if self.replay is not None:
            self.replay()
            step.meter.replayed += 1
        else:
            self.attended = []
            enter(step=replace(step, positions=self.positions, attended=self.attended if self.ends else None))
            with self.places.read_by(storages_of(step)):
                output = self._unreplayed(step, run)
            if output is not None:
                return output
        fields = {name: step.cache if value is None else value.clone() for name, value in self.fields.items()}
        return self.kind(**fields)

    def _unreplayed(self, step: Step, run: Callable[[Inputs], ModelOutput]) -> ModelOutput | None:
        """The decoder's output for one of the first tokens, which are not replayed; None: it was recorded, and is in
        `fields`."""
        if not self.plan.replays:
            return self._watch(step, run)
        self.patience -= 1
        if self.patience >= 0:
            return run(self.inputs)
        recorder = RECORDERS[self.positions.device.type]
        try:
            output, self.replay = recorder(lambda: run(self.inputs), self.positions.device)
        except RuntimeError as error:
            obstacles.refuse(step, f"recording failed ({str(error).splitlines()[0]})")
            self.attended.clear()
            return run(self.inputs)
        if _refuses_more(step, output):
            self.replay = None
            return output
        self.kind = type(output)
        self.fields = {name: None if value is step.cache else value for name, value in output.items()}
        return None

    def _watch(self, step: Step, run: Callable[[Inputs], ModelOutput]) -> ModelOutput:
        """Run the step unrecorded, and find out whether it can be recorded."""
        with Calls() as calls:
            output = run(self.inputs)
        self.watched.append(calls)
        if calls.reads:
            obstacles.refuse(step, f"{calls.reads} reads a number from a tensor")
        elif not _refuses_more(step, output) and len(self.watched) == 2:
            differs = self.watched[1].difference(self.watched[0])
            self.plan.replays = differs is None
            if differs:
                obstacles.refuse(step, f"{differs} has other numbers, or tensors in another place, for each token")
        if self.plan.replays is not None:
            self.watched = []
        return output


def _refuses_more(step: Step, output: ModelOutput) -> bool:
    """Whether the decoder returns more than hidden states and the cache; then its tokens are never recorded."""
    more = [name for name, value in output.items() if name != "last_hidden_state" and value is not step.cache]
    if more:
        obstacles.refuse(step, f"the decoder also returns {more[0]}")
    return bool(more)


def _alike(x: object, known: object, pads: bool) -> bool:
    """Whether x is the recorded argument `known`, or a tensor like it. pads: whether x may have fewer rows than it."""
    if not isinstance(known, Tensor):
        return x is known or x == known
    if not isinstance(x, Tensor) or x.dtype != known.dtype or x.dim() != known.dim():
        return False
    return x.shape == known.shape or (pads and x.shape[1:] == known.shape[1:] and len(x) > 1 < len(known))


def _first(x: object, rows: int) -> object:
    """The first batch rows of an output."""
    return tuple(_first(each, rows) for each in x) if type(x) is tuple else x[:rows] if isinstance(x, Tensor) else x


def storages_of(step: Step) -> list[Storage]:
    return [step.cache.layers[index].storage for index in step.plan.order]


def ends(step: Step) -> bool:
    """Whether something follows a token's attention: a choice of slots, or a score of the new slot."""
    return step.chooser is not None or step.plan.of_tokens is not None


def is_bound(plan: Plan) -> bool:
    """Whether a recording is of one cache alone: its calls have numbers or tensors of that cache."""
    return bool(plan.readers or plan.policy.decode or plan.wants_probs)
