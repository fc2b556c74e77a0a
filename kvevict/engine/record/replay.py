"""Decoded tokens without Python: the decoder's step is recorded once, on a GPU as a CUDA graph, and then replayed.

A step can be recorded if two steps call the same operators, with the same numbers, on the same outside tensors: what
differs from token to token then lies in memory that stays where it is. And Python reads no number from a tensor. That
is found out from two tokens, once for a plan.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers.utils import ModelOutput

from ... import cautions
from ...context import enter
from ...models import rotary
from ...models.compat import CACHE
from ..memory.layer import EvictionLayer
from ..read.layer import LayerCall, decide_later
from ..read.plan import Plan
from ..read.step import Step
from .calls import Calls
from .cuts import Cuts

Inputs = dict[str, Any]  # of a decoder's forward


def _graph(run: Callable[[], ModelOutput], device: torch.device) -> tuple[ModelOutput, Callable[[], None]]:
    """Compute what `run` computes on a GPU, and record it. Returns the result, and a function that computes it again,
    in the same memory, from inputs in the same memory."""
    graph, side, here = torch.cuda.CUDAGraph(), _side_stream(device), torch.cuda.current_stream(device)
    side.wait_stream(here)
    with torch.cuda.stream(side):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            output = run()
        finally:
            graph.capture_end()
    here.wait_stream(side)
    graph.replay()
    return output, graph.replay


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # the default one cannot record; each has a workspace of cuBLAS


def _program(run: Callable[[], ModelOutput], device: torch.device) -> tuple[ModelOutput, Callable[[], None]]:
    """The same on a CPU, where its operators are called again."""
    with Calls() as calls:
        output = run()
    return output, calls.again()


RECORDERS = {"cuda": _graph, "cpu": _program}
WATCHES = 16  # caches or places of slots after which a policy that evicts while decoding is not watched any more
PATIENCE = {"cuda": 1, "cpu": 8}  # tokens on slots that did not move before one is recorded: a recording takes time


class Replay:
    """The recorded step of one cache: its inputs in memory of their own, and its result. It does not refer to the
    cache, whose memory is free once the caller drops it."""

    def __init__(self, step: Step, inputs: Inputs) -> None:
        self.decoder, self.plan, self.storages = step.decoder, step.plan, step.cache.table.storages
        with torch.inference_mode(False):  # a cache filled in inference mode goes on outside of it
            self.positions = step.positions.clone()
            self.inputs = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
        self.watched: list[Calls] = []
        self.patience = PATIENCE[self.positions.device.type]  # beams, which move slots each time, are never recorded
        self.kind: type = ModelOutput  # of the decoder's output
        self.fields: dict[str, torch.Tensor | None] = {}  # of the output; None: the cache
        self.cuts = Cuts()
        self.attended: list[LayerCall] = []  # the layers of the last token, in the recording's memory
        self.replay: Callable[[], None] | None = None

    def fits(self, step: Step, inputs: Inputs) -> bool:
        """True if this step is another token of the same slots."""
        same = step.decoder is self.decoder and step.plan is self.plan and step.cache.table.storages is self.storages
        return same and inputs.keys() == self.inputs.keys() and all(map(_alike, inputs.values(), self.inputs.values()))

    def step(self, step: Step, run: Callable[[Inputs], ModelOutput], inputs: Inputs) -> ModelOutput:
        """The decoder's output for one more token. run: from inputs to it."""
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
        """The output of the decoder. Its layers' slots are not evicted yet."""
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
                _refuse(self.plan, f"recording failed ({str(error).splitlines()[0]})")
                self.attended.clear()
                return run(self.inputs)
            self.kind = type(output)
            self.fields = {name: None if value is step.cache else value for name, value in output.items()}
        else:
            self.replay()
            step.meter.replayed += 1
        fields = {name: step.cache if value is None else value.clone() for name, value in self.fields.items()}
        return self.kind(**fields)

    def _watch(self, step: Step, run: Callable[[Inputs], ModelOutput]) -> ModelOutput:
        """Run the step as before, and find out whether it can be recorded."""
        with Calls() as calls:
            output = run(self.inputs)
        self.watched.append(calls)
        if calls.reads:
            _refuse(self.plan, f"{calls.reads} reads a number from a tensor")
            return output
        more = [name for name, value in output.items() if name != "last_hidden_state" and value is not step.cache]
        if more:
            _refuse(self.plan, f"the decoder also returns {more[0]}")
        elif len(self.watched) == 2:
            differs = self.watched[1].difference(self.watched[0])
            self.watched = []
            self.plan.replays = differs is None
            if differs:
                _refuse(self.plan, f"{differs} has other numbers, or tensors in another place, for each token")
        return output


def _alike(x: object, known: object) -> bool:
    if isinstance(known, torch.Tensor):
        return isinstance(x, torch.Tensor) and x.shape == known.shape and x.dtype == known.dtype
    return x is known or x == known


def _refuse(plan: Plan, reason: str) -> None:
    """Tokens are decoded as before; say so once."""
    plan.replays = False
    cautions.once(("compiled", reason), f"compiled=True: tokens are decoded as without it, because {reason}", 2)


def decoded(step: Step, run: Callable[..., ModelOutput], **inputs: Any) -> ModelOutput:
    """The decoder's output, of its forward `run`, for a decoded token: replayed where that is possible."""
    if step.plan.replays is None and (reason := _obstacle(step)):
        _refuse(step.plan, reason)
    if step.plan.replays is False or not step.cache.table.storages:
        return run(**inputs)
    own = {name: x for name, x in inputs.items() if x is not step.cache}
    kept = step.cache.__dict__
    if "replay" not in kept or not kept["replay"].fits(step, own):
        step.plan.watches += step.plan.replays is None and step.chooser is not None
        if step.plan.watches > WATCHES:
            _refuse(step.plan, "the policy moves slots to other places with every token")
            return run(**inputs)
        kept["replay"] = Replay(step, own)
    return kept["replay"].step(step, lambda inputs: run(**inputs, **{CACHE: step.cache}), own)


def _obstacle(step: Step) -> str | None:
    """Why a decoded token cannot be recorded; None: perhaps it can."""
    device = step.positions.device
    if device.type not in RECORDERS:
        return f"the model is on a {device.type.upper()}"
    if any(type(layer) is not EvictionLayer for layer in step.cache.layers):
        return "the model has layers with a window, a state or latents"
    if rotary.rope_depends_on_length(step.decoder):
        return "the model's rotary frequencies depend on the text's length"
    if step.plan.ranks.size > 1 or len({p.device for p in step.decoder.parameters()}) > 1:
        return "the model is spread over devices"
    if torch.is_autocast_enabled(device.type):
        return "autocast is on"
    held = (each for m in step.decoder.modules() for each in (m._forward_hooks, m._forward_pre_hooks))
    hooks = (hook for each in held for hook in each.values())
    if not all(getattr(hook, "func", hook).__module__.startswith("kvevict.") for hook in hooks):  # ours are for prompts
        return "modules of the model have hooks, which a recorded token would not call"
    return None
