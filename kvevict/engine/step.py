"""What the decoder wrapper tells the attention function about the call that is running."""

import copy
from contextvars import ContextVar
from dataclasses import dataclass, field

import numpy as np
import torch

_current: ContextVar = ContextVar("kvevict_step", default=None)
called: ContextVar = ContextVar("kvevict_called", default=None)  # the Called of the model around the decoder that runs
shared_call: ContextVar = ContextVar("kvevict_shared_call", default=None)  # the kvevict.engine.replay.Call that runs


@dataclass
class Called:
    """A call of the model around the decoder."""

    model: object
    mask: object  # what its caller gave as attention_mask
    wanted: int  # logits of the last tokens; 0: of all
    request: object = None  # the kvevict.engine.request.Request of the decoder's call in it


@dataclass
class Read:
    """One reading of a prompt: what must survive from chunk to chunk."""

    prompt: int  # columns of the prompt, padding included
    tokens: np.ndarray  # [B] valid tokens of it
    seen: list  # per row tokens there will have been at its end, of all prompts
    evicts: bool  # slots will be lost, or scores need every row from the start
    meter: object  # the kvevict.engine.meter.Meter that measures it
    budgets: object = None  # the kvevict.engine.budgets.Budgets of its layers
    along: object = None  # the kvevict.policy.rows.Along that reads along
    state: dict = field(default_factory=dict)  # layer -> what its rows and its score keep from chunk to chunk
    diagnostics: dict = field(default_factory=dict)  # layer -> fp64 sums [4, B] of `kvevict.analysis.diagnose`


@dataclass
class Step:
    """One call of the decoder: a chunk, appended tokens, or a decoded token."""

    patch: object  # the kvevict.patch.Patch of the model
    decoder: object  # the text decoder that runs
    cache: object
    meter: object
    positions: torch.Tensor  # [B, S] int32, transient rows included
    first: torch.Tensor  # [B] int32 left padding in this call
    padding: np.ndarray  # the same on the host
    chooser: object = None  # the kvevict.engine.choosers.Chooser of what survives; None: everything does
    read: Read | None = None  # None while decoding and for appended tokens
    chunk: object = None  # the kvevict.engine.schedule.Chunk of the read
    transient: int = 0  # rows at the end that read along and are not stored
    final_position: int | None = None  # the prompt's largest position, for rotary frequencies that depend on it
    seen: tuple = ()  # (columns, tokens [B]) that count as seen, whatever a layer reads of them
    shared: dict = field(default_factory=dict, init=False)  # layer -> its View, while others still read its slots
    elsewhere: dict = field(default_factory=dict, init=False)  # device -> what `on` made for it

    def __post_init__(self):
        columns = self.positions.shape[1] - self.transient
        self.seen = self.seen or (columns, columns - np.minimum(self.padding, columns))

    def on(self, device):
        """This step for layers that compute on a device: it has `positions` and `first` there."""
        if self.positions.device == device:
            return self
        made = self.elsewhere.get(device)
        if made is None or made[0] is not self.positions:  # layers may get fewer rows than those before them
            moved = copy.copy(self)
            moved.positions, moved.first = self.positions.to(device), self.first.to(device)
            made = self.elsewhere[device] = self.positions, moved
        return made[1]

    @property
    def decoding(self) -> bool:
        return self.positions.shape[1] == 1 and self.read is None


def current() -> Step | None:
    return _current.get()


def enter(step: Step) -> None:
    """What follows in this call, which has a context of its own, is part of the step."""
    _current.set(step)
