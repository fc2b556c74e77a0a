"""Rows of the chunk itself, each of which sees the slots up to its own: no row, the last, the last few, or all."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from ..checks import count
from ..inputs import CallRows, LayerRows, Observation, OwnPolicy
from . import ROWS, Rows


@ROWS.add("none")
@dataclass(frozen=True)
class NoRows(Rows):
    """No query observes: for scores of keys or positions."""

    most: ClassVar[int] = 0

    def observe(self, call: LayerRows, past: object) -> Observation:
        raise ValueError("rows='none' has no queries: give rows='window', or another of kvevict.ROWS")

    def observing(self, rows: CallRows) -> np.ndarray:  # diagnostics' rows
        return rows.tokens


@ROWS.add("last")
@dataclass(frozen=True)
class Last(Rows):
    """The last row. Its slot may be evicted (TOVA)."""

    newest: ClassVar[bool] = True
    most: ClassVar[int] = 1

    def observe(self, call: LayerRows, past: object) -> Observation:
        return call.chunk(1)


@ROWS.add("all")
@dataclass(frozen=True)
class All(Rows):
    """Every row of a chunk, and every decoded one (H2O)."""

    newest: ClassVar[bool] = True
    most: ClassVar[int] = 2**31 - 1

    def observe(self, call: LayerRows, past: object) -> Observation:
        return call.chunk()


@ROWS.add("window")
@dataclass(frozen=True)
class Window(Rows):
    """The last `window` rows. Their slots are kept (SnapKV)."""

    window: int = 32

    @property
    def most(self) -> int:
        return self.window

    protected = decoded = most

    def check(self, policy: OwnPolicy) -> None:
        count("window", self.window, 1)

    def observe(self, call: LayerRows, past: object) -> Observation:
        return call.chunk(self.window)

    def protect(self, call: LayerRows) -> int | torch.Tensor:
        return self.window


@dataclass(frozen=True)
class FirstWindow(Window):
    """The window of the cut after which a model drafts for itself (LAQ): at most half of a layer's slots, so that a
    small budget holds more than a window."""

    def observe(self, call: LayerRows, past: object) -> Observation:
        return call.chunk(self.window, self.protect(call))

    def protect(self, call: LayerRows) -> torch.Tensor:
        return (call.budget // 2).clamp(1, self.window)
