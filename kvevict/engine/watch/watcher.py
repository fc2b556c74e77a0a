"""The interface to observe a read from outside: `with within(watchers=(watcher,)): model(..)` (context.py)."""

import torch

from ..cut import Choice
from ..memory.cache import EvictionCache
from ..read.layer import LayerCall


class Watcher:
    """Called for every layer and chunk of a read, in the thread that reads. A watcher must not change the read."""

    rows = 0  # how many of a call's last query rows `cut` needs; layers whose choice is deferred keep that many

    def read(self, call: LayerCall, score: torch.Tensor | None) -> None:
        """Called when a layer has attended. score: of its slots, neither pooled nor refined; None: not scored."""

    def cut(self, call: LayerCall, choice: Choice) -> None:
        """Called before a layer loses the slots that are not in the choice."""

    def chunk(self, cache: EvictionCache) -> None:
        """Called when a chunk was read and all of its layers have chosen."""

    def report(self, rows: int, own: list[bool]) -> dict:
        """Entries for `kvevict.report` of a batch of `rows` rows. own: per layer, whether it is evicted from."""
        return {}
