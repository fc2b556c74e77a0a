"""What a slot is worth. One file per score; the file registers it, and its fields are its options.

A score sees a `kvevict.engine.view.View` of one layer: the alive slots of every kv head, the observing rows, and what
attention knows about them. It returns fp32 [B, Hkv, C] (or [B, 1, C], shared by the heads), column i being alive slot
i, and pools those in a step of its own; it never edits scores to protect a slot, it says how many slots at either end
are protected.
"""

import sys
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from ..checks import count, one_of
from ..registry import Registry, load_folder

SCORES = Registry("score")


@dataclass(frozen=True)
class Score:
    decodes: ClassVar[bool] = False  # evicting while decoding is part of the method
    interval: ClassVar[int] = 16  # decoded tokens between two evictions, when evicting while decoding
    carries: ClassVar[bool] = False  # the score is a running sum that stays with the slot
    last_row: ClassVar[bool] = False  # needs the newest row's attention at every decode step
    rows: ClassVar[int] = 0  # decoded queries to remember for scoring while decoding
    length: ClassVar[int] = 0  # rows of the probe
    span: ClassVar[tuple | None] = None  # where the probe is in the prompt, if not at its end
    behind: ClassVar[bool] = False  # the probe's tokens are no part of the prompt, they follow it: see `prepare`
    held: ClassVar[int] = 0  # last rows with which layers wait until tokens were drafted behind the prompt; 0: none are
    ordinal: ClassVar[bool] = False  # scores only rank slots: they may be negative, and their sums mean nothing
    passes: ClassVar[int] = 1  # how often a window's logits are computed, which `kvevict.analysis.cost` counts
    outputs: ClassVar[bool] = False  # scoring needs the observing rows' attention outputs
    shared: ClassVar[bool] = False  # one choice for all heads of a layer
    rerotate: ClassVar[bool] = False  # rows attend by distances within the cache, as in `kvevict.engine.rerotate`
    tsp: ClassVar[int | str | None] = None  # the last layer that reads every token, as in `kvevict.engine.propagate`
    tsp_len: ClassVar[int] = 0  # tokens of a chunk that the layers behind it read
    append: ClassVar[bool] = True  # the probe reads along with every chunk
    probe_positions: ClassVar[str] = "true"  # of the probe's rows: their own, or right "after" the chunk

    def protect(self, view) -> tuple[int, int | torch.Tensor]:
        """How many of the first and of the last alive slots are always kept (the last: a number or one per row)."""
        return 0, 0

    def smallest_budget(self) -> int:
        """The smallest budget that leaves one slot to be won by score."""
        return 1

    def check(self, policy) -> None:
        """Raise ValueError when the options do not fit each other or the policy."""

    def ready(self) -> None:
        """Raise ValueError when an option that has no default is missing; called when a model is patched."""

    def prepare(self, call, prompt: int) -> torch.Tensor | None:
        """Called before a prompt of `prompt` columns that will be evicted from is read, by a `kvevict.engine.prefill.Call`:
        the ids [B, length] that read along, if they are `behind` the prompt. Raises ValueError for a call that cannot
        be scored."""

    def observe(self, view) -> None:
        """Called for every chunk, also when nothing is evicted."""

    def increment(self, view):
        """What the chunk's rows (or the decoded row) add to a carried score: [B, Hkv, C]."""
        raise NotImplementedError

    def score(self, view) -> torch.Tensor:
        """Importance of every alive slot, not pooled: [B, Hkv, C] or [B, 1, C]."""
        raise NotImplementedError

    def pooled(self, view, score) -> torch.Tensor:
        """What slots are ranked by: their scores pooled over neighbours."""
        return score


POOLS = ("max", "avg", "none")


def pool(score, view, kernel: int, kind: str):
    """Pool each head's unprotected slots with stride 1 (METHODS section 0): max pads with -inf, avg divides by the
    kernel size with zero padding. Columns of protected slots are unspecified. Shape stays [B, Hkv, C]."""
    if kind == "none" or kernel == 1 or score.shape[-1] == 0:
        return score
    if kind == "max":
        return F.max_pool1d(score.masked_fill(~view.competing, -torch.inf), kernel, 1, kernel // 2)
    return F.avg_pool1d(score.masked_fill(~view.competing, 0), kernel, 1, kernel // 2)


def check_pool(kernel: int, kind: str) -> None:
    one_of("pool", kind, POOLS)
    if count("kernel", kernel, 1) % 2 == 0:
        raise ValueError(f"kernel must be odd, so that pooling keeps the length, got {kernel}")


load_folder(sys.modules[__name__])
