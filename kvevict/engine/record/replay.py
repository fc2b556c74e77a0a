"""Decoded tokens without Python: the decoder's step is recorded once (calls.py) and then replayed.

A step can be recorded if Python reads no number from a tensor, and if two tokens call the same operators, with the same
numbers, on tensors at the same addresses: then all that differs from token to token is in tensors that are not moved.
Two tokens are compared once for each plan; obstacles.py has the reasons that are known without them.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers.utils import ModelOutput

from ... import cautions
from ...context import enter
from ...models.compat import CACHE
from ..read.layer import LayerCall, decide_later
from ..read.step import Step
from . import obstacles
from .calls import PATIENCE, RECORDERS, Calls
from .cuts import Cuts
from .obstacles import Inputs

WATCHES = 16  # attempts to record a policy that evicts while decoding, each on a new cache or after slots have moved


class Replay:
    """The recorded step of one cache, with copies of its inputs, and its output. It does not refer to the cache, whose
    memory is free once the caller drops it."""

    def __init__(self, step: Step, inputs: Inputs) -> None:
        self.decoder, self.plan, self.table = step.decoder, step.plan, step.cache.table.number
        with torch.inference_mode(False):  # a cache filled in inference mode is decoded outside of it, too
            self.positions = step.positions.clone()
            self.inputs = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
        self.watched: list[Calls] = []
        self.patience = PATIENCE[self.positions.device.type]  # not used up by beams, which move slots with each token
        self.kind: type = ModelOutput  # the class of the decoder's output
        self.fields: dict[str, torch.Tensor | None] = {}  # of that output; None: the cache
        self.cuts = Cuts()
        # Each layer's call for the last token, whose tensors lie in the recording's memory.
        self.attended: list[LayerCall] = []
        self.replay: Callable[[], None] | None = None

    def fits(self, step: Step, inputs: Inputs) -> bool:
        """Whether this step is a later token on the same slots."""
        same = step.decoder is self.decoder and step.plan is self.plan and step.cache.table.number == self.table
        return same and inputs.keys() == self.inputs.keys() and all(map(_alike, inputs.values(), self.inputs.values()))

    def step(self, step: Step, run: Callable[[Inputs], ModelOutput], inputs: Inputs) -> ModelOutput:
        """The decoder's output for one more token. run: its forward, from the inputs."""
        self.positions.copy_(step.positions)
        for name, x in inputs.items():
            if isinstance(x, torch.Tensor):
                self.inputs[name].copy_(x)
        output = self._output(step, run)
        if self.replay is None:
            decide_later(step, self.attended)
        elif self.attended:
            self.cuts.after(step, self.attended, self.positions)
        return output

    def _output(self, step: Step, run: Callable[[Inputs], ModelOutput]) -> ModelOutput:
        """The decoder's output, before slots are evicted."""
        if self.replay is None:
            self.attended = []
            enter(step=replace(step, positions=self.positions, attended=self.attended))
            if not self.plan.replays:
                return self._watch(step, run)
            self.patience -= 1
            if self.patience >= 0:
                return run(self.inputs)
            recorder = RECORDERS[self.positions.device.type]
            try:
                output, self.replay = recorder(lambda: run(self.inputs), self.positions.device)
            except RuntimeError as error:
                _refuse(step, f"recording failed ({str(error).splitlines()[0]})")
                self.attended.clear()
                return run(self.inputs)
            if _refuses_more(step, output):
                self.replay = None
                return output
            self.kind = type(output)
            self.fields = {name: None if value is step.cache else value for name, value in output.items()}
        else:
            self.replay()
            step.meter.replayed += 1
        fields = {name: step.cache if value is None else value.clone() for name, value in self.fields.items()}
        return self.kind(**fields)

    def _watch(self, step: Step, run: Callable[[Inputs], ModelOutput]) -> ModelOutput:
        """Run the step unrecorded, and find out whether it can be recorded."""
        with Calls() as calls:
            output = run(self.inputs)
        self.watched.append(calls)
        if calls.reads:
            _refuse(step, f"{calls.reads} reads a number from a tensor")
        elif not _refuses_more(step, output) and len(self.watched) == 2:
            differs = self.watched[1].difference(self.watched[0])
            self.plan.replays = differs is None
            if differs:
                _refuse(step, f"{differs} has other numbers, or tensors in another place, for each token")
        if self.plan.replays is not None:
            self.watched = []
        return output


def _refuses_more(step: Step, output: ModelOutput) -> bool:
    """Whether the decoder returns more than hidden states and the cache; then its tokens are never recorded."""
    more = [name for name, value in output.items() if name != "last_hidden_state" and value is not step.cache]
    if more:
        _refuse(step, f"the decoder also returns {more[0]}")
    return bool(more)


def _alike(x: object, known: object) -> bool:
    if isinstance(known, torch.Tensor):
        return isinstance(x, torch.Tensor) and x.shape == known.shape and x.dtype == known.dtype
    return x is known or x == known


def _refuse(step: Step, reason: str) -> None:
    """Never record tokens of the step's plan."""
    step.plan.replays, step.plan.unrecorded = False, reason
    _tell(step, reason)


def _tell(step: Step, reason: str) -> None:
    """Note for the report why a token is not recorded, and warn once where the user asked for recorded tokens."""
    step.meter.unrecorded = reason
    if step.plan.run.compiled is True:
        cautions.once(("compiled", reason), f"compiled=True: tokens are decoded as without it, because {reason}")


def decoded(step: Step, run: Callable[..., ModelOutput], **inputs: Any) -> ModelOutput:
    """The decoder's output for a decoded token, by its forward `run` or, if possible, by a replay."""
    if step.plan.replays is None and (reason := obstacles.of_plan(step)):
        _refuse(step, reason)
    step.meter.unrecorded = step.plan.unrecorded
    if step.plan.replays is False or not step.cache.table.groups:
        return run(**inputs)
    own = {name: x for name, x in inputs.items() if x is not step.cache}
    if reason := obstacles.of_call(step, own):
        _tell(step, reason)
        return run(**inputs)
    kept = step.cache.__dict__
    if "replay" not in kept or not kept["replay"].fits(step, own):
        step.plan.watches += step.plan.replays is None and step.chooser is not None
        if step.plan.watches > WATCHES:
            _refuse(step, "the policy moves slots to other places with every token")
            return run(**inputs)
        kept["replay"] = Replay(step, own)
    return kept["replay"].step(step, lambda inputs: run(**inputs, **{CACHE: step.cache}), own)
