"""The interface of objects that observe how a prompt is read: `with within(watchers=(watcher,)): model(..)`, with
`within` of context.py."""

import torch

from ..cut import Choice
from ..memory.cache import EvictionCache
from ..read.layer import LayerCall


class Watcher:
    """Methods that are called for every layer and chunk while a prompt is read, in the thread that reads. They must not
    change the read."""

    # Number of a call's last query rows that `cut` needs; a layer that waits for another layer's choice keeps these
    rows = 0

    def read(self, call: LayerCall, score: torch.Tensor | None) -> None:
        """Called when a layer has attended. score: the score of the layer's slots, neither pooled nor refined; None:
        the slots are not scored."""

    def cut(self, call: LayerCall, choice: Choice) -> None:
        """Called before a layer loses the slots that `choice` leaves out."""

    def chunk(self, cache: EvictionCache) -> None:
        """Called when a chunk has been read and all layers have chosen their slots."""

    def report(self, rows: int, own: list[bool]) -> dict:
        """Return entries for `kvevict.report` of a batch with `rows` rows. own: for each layer, whether slots are
        evicted from it."""
        return {}
