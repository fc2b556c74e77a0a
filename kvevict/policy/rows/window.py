"""Rows of the chunk itself observe, causally: none, the last row, the last few rows, or all rows."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from ..checks import count, flag
from ..inputs import CallRows, LayerRows, Observation, OwnPolicy
from . import ROWS, Rows


@ROWS.add("none")
@dataclass(frozen=True)
class NoRows(Rows):
    """No query observes, for scores that depend on keys, values or positions alone."""

    most: ClassVar[int] = 0

    def observe(self, call: LayerRows, past: object) -> Observation:
        raise ValueError("rows='none' has no queries: give rows='window', or another of kvevict.ROWS")

    def observing(self, rows: CallRows) -> np.ndarray:  # rows that diagnostics measure
        return rows.tokens


@ROWS.add("last")
@dataclass(frozen=True)
class Last(Rows):
    """The last row observes, and its slot may be evicted (TOVA)."""

    newest: ClassVar[bool] = True
    most: ClassVar[int] = 1

    def observe(self, call: LayerRows, past: object) -> Observation:
        return call.chunk(1)


@ROWS.add("all")
@dataclass(frozen=True)
class All(Rows):
    """Every row of a chunk and every decoded row observes (H2O)."""

    newest: ClassVar[bool] = True
    most: ClassVar[int] = 2**31 - 1

    def observe(self, call: LayerRows, past: object) -> Observation:
        return call.chunk()


@ROWS.add("window")
@dataclass(frozen=True)
class Window(Rows):
    """The last `window` rows observe, and their slots are kept (SnapKV).

    keep_window   False: the rows' slots compete by score as all others do (CAOTE keeps none)
    """

    window: int = 32
    keep_window: bool = True

    @property
    def most(self) -> int:
        return self.window

    decoded = most

    @property
    def protected(self) -> int:
        return self.window if self.keep_window else 0

    def check(self, policy: OwnPolicy) -> None:
        count("window", self.window, 1)
        flag("keep_window", self.keep_window)

    def observe(self, call: LayerRows, past: object) -> Observation:
        return call.chunk(self.window)

    def protect(self, call: LayerRows) -> int | torch.Tensor:
        return self.protected


@dataclass(frozen=True)
class FirstWindow(Window):
    """The window for the eviction before a model drafts for itself (LAQ). The window has at most half of a layer's
    budget, so that a small budget also holds slots chosen by score."""

    def observe(self, call: LayerRows, past: object) -> Observation:
        return call.chunk(self.window, self.protect(call))

    def protect(self, call: LayerRows) -> torch.Tensor:
        return (call.budget // 2).clamp(1, self.window)
