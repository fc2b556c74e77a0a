"""Which queries observe (METHODS section 1a). One file per idea; the file registers it, and its fields are its options.

Rows say what reads along behind a chunk, which queries of a `View` observe, and which slots are theirs and are kept. A
score turns what they pay attention to into numbers; every score works with every rows but where `rules.py` says why
not. While decoding there is nothing to read along: the newest row observes, or the last `decoded` ones.
"""

import contextlib
import sys
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from ..registry import Registry, load_folder

ROWS = Registry("rows")


@dataclass
class Along:
    """Rows that read along behind every chunk of a prompt and are not stored."""

    tokens: object  # ids [B, p] or embeddings [B, p, E]; where a chunk has fewer rows along, these are the last
    positions: object  # [B, p] in the prompt or behind it; None: right behind each chunk
    columns: object = None  # [B, p] of the prompt that they are; None: they are not of the prompt
    adapter: object = None  # whose `on(decoder)` is entered while they read

    def last(self, count):
        """The last `count` of them."""
        tokens, positions, columns = (
            t if t is None else t[:, -count:] for t in (self.tokens, self.positions, self.columns)
        )
        return Along(tokens, positions, columns, self.adapter)

    def adapted(self, decoder):
        return contextlib.nullcontext() if self.adapter is None else self.adapter.on(decoder)


class Part(NamedTuple):
    """Observers as `kvevict plan` counts them: `rows` rows over `slots` alive slots."""

    rows: int
    slots: int
    causal: bool  # the rows are the last slots' own
    attended: bool  # their log-sum-exp and outputs over these slots are known from attention itself


@dataclass(frozen=True)
class Rows:
    whole: ClassVar[bool] = False  # they exist once the whole prompt was read, so layers wait for that
    turns: ClassVar[bool] = False  # they turn queries from one position to another: `View.rotate`
    splits: ClassVar[bool] = True  # they can do with a rank's part of a model (tensor parallel)
    newest: ClassVar[bool] = False  # while decoding the newest row observes, and none is remembered
    n_d: ClassVar[int] = 0  # tokens that are drafted

    @property
    def most(self) -> int:
        """How many rows observe at most."""
        raise NotImplementedError

    @property
    def protected(self) -> int:
        """How many slots `protect` keeps at most."""
        return 0

    @property
    def decoded(self) -> int:
        """How many decoded rows are remembered to observe while decoding."""
        return 0

    def inside(self, along: int) -> int:
        """How many of `along` rows that read along the prompt ends with, so that its last chunk has them as its own."""
        return 0

    def check(self, policy) -> None:
        """Raise ValueError when the options do not fit each other or the policy."""

    def ready(self, decoder) -> None:
        """Raise ValueError when an option that has no default is missing, or not for this decoder; called when a model
        is patched."""

    def told(self, response) -> "Rows":
        """These rows where the ids of the true response are known: the rows of a reference may look at them."""
        return self

    def along(self, tokens: int) -> int:
        """How many rows read along behind the chunks of a prompt of `tokens` tokens that is evicted from."""
        return 0

    def prepare(self, request, read) -> Along | None:
        """Called before a prompt is read, with the `kvevict.engine.request.Request` and the `Read`: what reads along if
        the prompt is evicted from. Raises ValueError for a prompt that cannot be observed."""

    def note(self, view) -> None:
        """Called for every chunk of every layer that chooses, also when nothing is evicted."""

    def observers(self, view) -> list:
        """The `Observers` of a chunk, at least one."""
        raise NotImplementedError

    def observing(self, step):
        """int [B] how many of a call's last rows observe, those that read along included."""
        raise NotImplementedError

    def protect(self, view):
        """How many of the last alive slots are the rows' own and always kept: a number or int32 [B]."""
        return 0

    def parts(self, rows: int, stored: int, along: int, tokens: int) -> list:
        """`Part`s that observe a layer of `stored` slots behind a chunk of `rows` rows, `along` rows reading along;
        tokens: the prompt's."""
        return []

    def __deepcopy__(self, memo):  # immutable, and what drafts for it is another model
        return self


def last(rows: int, most: int, stored: int) -> Part:
    """The last `most` of a chunk's rows, as `plan` counts them."""
    return Part(min(rows, most), stored + rows, True, True)


def tokens_of(step):
    """int [B] rows of a call that are no padding, those that read along included."""
    return step.positions.shape[1] - step.padding


def at_most(count: int, step):
    return np.minimum(count, tokens_of(step))


load_folder(sys.modules[__name__])
