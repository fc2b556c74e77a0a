"""Observing a read from outside: `with within(watchers=(watcher,)): model(..)` (context.py)."""

from typing import Any

import torch

from ..cut import Choice
from ..memory.cache import EvictionCache
from ..read.layer import LayerCall


class Watcher:
    """Called for every layer and chunk of a read, in the thread that reads. It changes nothing."""

    rows = 0  # how many of a call's last query rows `cut` needs; layers whose choice is deferred keep as many

    def read(self, call: LayerCall, score: torch.Tensor | None) -> None:
        """A layer has attended. call: a `kvevict.engine.read.layer.LayerCall`; score: its slots' scores, neither
        pooled nor refined; None if they were not scored."""

    def cut(self, call: LayerCall, choice: Choice) -> None:
        """A layer is about to lose slots, by a `kvevict.engine.cut.Choice`."""

    def chunk(self, cache: EvictionCache) -> None:
        """A chunk was read, and all of its layers have chosen."""

    def report(self, rows: int, own: list[bool]) -> dict[str, Any]:
        """Entries for `kvevict.report`, for a batch of `rows` rows. own: by layer, whether it is evicted from."""
        return {}
