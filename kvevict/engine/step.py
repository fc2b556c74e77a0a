"""What the decoder wrapper tells the attention function about the call that is running."""

import contextlib
from contextvars import ContextVar
from dataclasses import dataclass, field

import numpy as np
import torch

STATE = "_kvevict"  # attribute of the text decoder that holds its Patch, outside nn.Module's registries
_current: ContextVar = ContextVar("kvevict_step", default=None)
top_model: ContextVar = ContextVar("kvevict_top_model", default=None)  # the model around the decoder that runs
logits_wanted: ContextVar = ContextVar("kvevict_logits_wanted", default=0)  # of the last tokens; 0: of all


@dataclass
class Read:
    """One reading of a prompt: what must survive from chunk to chunk."""

    tokens: np.ndarray  # [B] valid tokens of this prompt
    seen: list  # per row tokens there will have been at its end, of all prompts
    warmup: np.ndarray  # [B] slots of a waiting layer, over its kv heads, before the last chunk
    targets: np.ndarray | None = None  # [layers, B] slots of each layer, over its kv heads, after this chunk
    alive: torch.Tensor | None = None  # [layers, B] slots of each layer with this chunk's, before it is cut
    cuts: np.ndarray | None = None  # [B] whether a row loses slots after this chunk
    errors: torch.Tensor | None = None  # [layers, B] fp64 sums over chunks of the layers' errors
    measurements: np.ndarray | None = None  # [B] how many chunks those are
    state: dict = field(default_factory=dict)  # layer -> the score's own state
    diagnostics: dict = field(default_factory=dict)  # layer -> fp64 sums [4, B] of `kvevict.analysis.diagnose`
    probe_length: np.ndarray | None = None  # [B] probe rows of each batch row
    probe_rows: int = 0  # the largest of them
    behind: torch.Tensor | None = None  # [B, probe_rows] token ids of a probe that follows the prompt


@dataclass
class Probe:
    """Rows that read along with every chunk and are not stored."""

    tokens: torch.Tensor  # ids [B, p] or embeddings [B, p, E]
    positions: torch.Tensor  # [B, p], where they are in the prompt or behind it


@dataclass
class Step:
    """One call of the decoder: a chunk, appended tokens, or a decoded token."""

    patch: object  # the kvevict.patch.Patch of the model
    decoder: object  # the text decoder that runs
    cache: object
    positions: torch.Tensor  # [B, S] int32, transient rows included
    first: torch.Tensor  # [B] int32 left padding in this chunk
    padding: np.ndarray  # the same on the host
    read: Read | None = None  # None while decoding and for appended tokens
    last: bool = True  # the chunk ends the prompt
    transient: int = 0  # rows at the end that read along and are not stored
    ends_with_probe: bool = False  # the last stored rows are the probe
    waiting: list = field(default_factory=list)  # views of layers that wait for a later layer's choice
    held: list | None = None  # views of all layers, where they wait for tokens that the model will draft
    choice: tuple | None = None  # (index, keep) of the last layer that chose; None: it kept everything
    measured: dict | None = None  # layer -> its error [B] in this chunk, where the layer budget asks for it
    cascade: object | None = None  # the kvevict.engine.cascade.Cascade of this chunk, where the layer budget cascades
    residual: dict = field(default_factory=dict)  # layer -> the residual stream that entered it
    turned: dict = field(default_factory=dict)  # layer -> how far it turned that stream [B]
    propagated: tuple | None = None  # (columns [B, K], first, padding) of the chunk that upper layers read; None: all
    whole: tuple | None = None  # (columns, tokens [B]) of the chunk, in layers that read less of it
    final_position: int | None = None  # the prompt's largest position, for rotary frequencies that depend on it

    @property
    def decoding(self) -> bool:
        return self.positions.shape[1] == 1 and self.read is None


def current() -> Step | None:
    return _current.get()


@contextlib.contextmanager
def running(step: Step):
    token = _current.set(step)
    try:
        yield step
    finally:
        _current.reset(token)
