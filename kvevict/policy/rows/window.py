"""Rows of the chunk itself, causal: none, the last one, the last few, or all."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..checks import count
from ..inputs import CallRows, LayerRows, Observation, Policy
from . import ROWS, Rows


@ROWS.add("none")
@dataclass(frozen=True)
class NoRows(Rows):
    """No query observes: for scores of keys or positions."""

    most: ClassVar[int] = 0

    def observe(self, call: LayerRows, past: Any) -> Observation:
        raise ValueError("rows='none' has no queries: give rows='window', or another of kvevict.ROWS")

    def observing(self, rows: CallRows) -> Any:  # the rows of diagnostics
        return rows.tokens


@ROWS.add("last")
@dataclass(frozen=True)
class Last(Rows):
    """The last row. Its slot is not kept for that (TOVA)."""

    newest: ClassVar[bool] = True
    needs_question: ClassVar[bool] = True
    most: ClassVar[int] = 1

    def observe(self, call: LayerRows, past: Any) -> Observation:
        return call.chunk(1)

    def observing(self, rows: CallRows) -> Any:
        return np.minimum(1, rows.tokens)


@ROWS.add("all")
@dataclass(frozen=True)
class All(Rows):
    """Every row of a chunk, and every decoded one (H2O)."""

    newest: ClassVar[bool] = True
    most: ClassVar[int] = 2**31 - 1

    def observe(self, call: LayerRows, past: Any) -> Observation:
        return call.chunk()

    def observing(self, rows: CallRows) -> Any:
        return rows.tokens


@ROWS.add("window")
@dataclass(frozen=True)
class Window(Rows):
    """The last `window` rows. Their slots are kept (SnapKV)."""

    window: int = 32

    @property
    def most(self) -> Any:
        return self.window

    protected = decoded = most

    def check(self, policy: Policy) -> None:
        count("window", self.window, 1)

    def observe(self, call: LayerRows, past: Any) -> Observation:
        return call.chunk(self.window)

    def observing(self, rows: CallRows) -> Any:
        return np.minimum(self.window, rows.tokens)

    def protect(self, call: LayerRows) -> Any:
        return self.window


@dataclass(frozen=True)
class FirstWindow(Window):
    """Rows for the cut over which a model drafts for itself: a window of at most half of the slots of a layer, so
    that a small budget holds more than a window."""

    def observe(self, call: LayerRows, past: Any) -> Observation:
        return call.chunk(self.window, self.protect(call))

    def protect(self, call: LayerRows) -> Any:
        return (call.budget // 2).clamp(1, self.window)
