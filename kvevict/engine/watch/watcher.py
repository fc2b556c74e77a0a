"""Observing a read from outside: `with within(watchers=(watcher,)): model(..)` (context.py)."""

from typing import Any

import torch

from ..read.evict import Choice
from ..read.layer import LayerCall
from ..read.step import Step


class Watcher:
    """Called for every layer of a read, in the thread that reads. It changes nothing."""

    rows = 0  # how many of a call's last query rows `cut` needs; layers whose choice is deferred keep as many

    def layer(self, step: Step) -> None:
        """A layer is about to attend in a `kvevict.engine.read.step.Step`. The model may be called here."""

    def read(self, call: LayerCall, score: torch.Tensor | None) -> None:
        """A layer has attended. call: a `kvevict.engine.read.layer.LayerCall`; score: its slots' scores, neither
        pooled nor refined; None if they were not scored."""

    def cut(self, call: LayerCall, choice: Choice) -> None:
        """A layer is about to lose slots, by a `kvevict.engine.read.evict.Choice`."""

    def chunk(self, rows: int, left: int) -> None:
        """A chunk of `rows` tokens has been read, 0 before the first one; `left` are left. Appended ones, such as
        repeated tokens, count too. The model may be called here."""

    def report(self, rows: int, own: list[bool]) -> dict[str, Any]:
        """Entries for `kvevict.report`, for a batch of `rows` rows. own: by layer, whether it is evicted from."""
        return {}
