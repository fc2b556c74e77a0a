"""Recall: the slots of all tokens that a cache has read, from which evicted slots come back, and what its layers attend
to (docs/methods.md section 13)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...policy.run import Run
from . import host
from .awaited import Answering, Awaited, Rows
from .every import Every, appended, before, begun, empty, followed, forked, here, here_in, in_place, last
from .layer import EvictionLayer
from .rows import Apart, joined, together
from .sequence import Sequence
from .storage import Storage


class Tiers:
    """The slots of all tokens read, beside the layers of a cache.

    A layer attends to its `storage`, and does not know which slots these are: those kept by the last cut, or, from
    `turn`, `ask` or `recall` on, those of all tokens, until its next cut. Between steps the drivers of steps change
    this, and while the layers store new rows, `write` adds the rows to the slots of all tokens.
    """

    def __init__(self, sequence: Sequence, layers: dict[int, EvictionLayer]) -> None:
        self.sequence, self.layers = sequence, layers  # the tokens read; decoder layer -> its cache layer
        # Layer -> the slots of the first `columns` columns; {} if the policy of the last read did not recall
        self.every: dict[int, Every] = {}
        self.columns = 0
        # The phase of each batch row: an answer that attends to all slots and is still to choose; None: the row attends
        # to kept slots. []: all rows do
        self.answers: list[Answering | None] = []

    def on(self, sequence: Sequence, layers: dict[int, EvictionLayer]) -> Tiers:
        """Return the same for copies of the layers."""
        twin = Tiers(sequence, layers)
        twin.every, twin.columns, twin.answers = {**self.every}, self.columns, [*self.answers]
        return twin

    # -- new tokens -------------------------------------------------------------------------------------------------

    def begin(self, recall: bool, run: Run) -> None:
        """Prepare for tokens to be read: add the slots of the tokens decoded since the last read, or drop all slots but
        the kept ones if `recall` is False."""
        self.settle()
        self.sequence.run = run
        if recall:
            self.append_last()
        else:
            self.every = {}  # this read adds no slots, so its tokens would be missing
        self.columns = self.sequence.columns

    def write(
        self, index: int, k: Tensor, v: Tensor, pos: Tensor, first: Tensor, padding: np.ndarray,
        expected: int | np.ndarray = 0,
    ) -> None:  # fmt: skip
        """Add new columns of layer `index`, with the arguments of `Storage.append`."""
        layer, sequence = self.layers[index], self.sequence
        every = self.every[index] if index in self.every else empty(layer)
        self.every[index] = appended(layer, every, k, v, pos, first, padding, expected)
        self.columns = sequence.columns + sequence.coming[0]

    @torch.no_grad()
    def represent(self, index: int, kind: str, *seen: Any) -> None:
        """Prepare how rows of layer `index` are packed, if otherwise than in the layer: before the first rows, or to
        set the key centres of batch rows that have none yet. kind: a name in `kv.KINDS` (int8, ..); seen: the arguments
        of `EvictionLayer.represent` from `query` on."""
        layer, every = self.layers[index], self.every.get(index)
        if every is None:
            kinds, centre, known = layer.packing(kind, *seen)
            assert kinds is not None
            self.every[index] = empty(layer, layer.storage.none(kinds, centre, known))
        elif not every.is_centred:
            assert isinstance(every, Storage)  # not `Apart`: batch rows have centres before they are joined
            _, centre, known = layer.packing(None, *seen)
            self.every[index] = every = every.centred_at(centre.to(every.device), known)
            layer.hold(layer.storage.centred_as(every), layer.head_offsets)  # after a recall it has these slots

    def append_last(self) -> None:
        """Add the slots of the tokens decoded since the last read; at first, all slots of each layer."""
        for index, layer in self.layers.items():
            if layer.is_initialized:
                self._append_last(index)

    def _append_last(self, index: int) -> None:
        layer, every = self.layers[index], self.every.get(index)
        self.every[index] = begun(layer) if every is None else followed(layer, in_place(layer, every), self._since)

    @property
    def _since(self) -> int:
        """The number of tokens whose slots are in the layers alone."""
        return self.sequence.columns - self.columns

    @staticmethod
    def wait() -> None:
        """Wait until all rows have arrived, since the host may read or move them between steps."""
        host.wait()

    # -- phases, changed between steps ------------------------------------------------------------------------------

    @property
    def lost(self) -> bool:
        """Whether some layer attends to fewer slots than those of all tokens."""
        return any((every.total_counts > self.layers[index].counts).any() for index, every in self.every.items())

    def turn(self) -> None:
        """Let every layer attend to the slots of all tokens, until its next cut. No slot is copied here; a layer whose
        slots lie in several parts copies them into one buffer when it attends, so that one layer at a time has a
        copy."""
        for index, every in self.every.items():
            layer = self.layers[index]
            layer.hold(before(layer, every))

    def share(self) -> None:
        """Let every layer, which keeps all slots, share those of all tokens, so that they are not stored twice, except
        where these are in the host's memory."""
        for index, every in self.every.items():
            if not every.on_host:
                self._restore(index, every)

    def recall(self, index: int, due: np.ndarray) -> None:
        """Let layer `index` attend to the slots of all tokens, until its next cut, in batch rows b with due[b] True."""
        layer, every = self.layers[index], self.every[index]
        if every.on_host:
            host.wait()  # this step's decoded row must arrive there before the host moves it
        layer.hold(here_in(layer, every, due))
        layer.storage.fetch()

    def ask(self, asked: Mapping[int, Awaited]) -> None:
        """Begin the answers to a prompt: let them attend to the slots of all tokens, and put the slots kept at the
        prompt's end aside, until the answers' own rows choose, or until `settle`. If the slots of all tokens are in the
        host's memory, they stay there, and the answers attend to the kept slots. asked: layer -> what it kept."""
        found = {index: self._put_aside(index, each) for index, each in asked.items()}
        rows = range(len(self.sequence.seen))  # type: ignore[arg-type]  # tokens were read
        self.answers = [Answering({index: each.row(row) for index, each in found.items()}) for row in rows]

    def _put_aside(self, index: int, asked: Awaited) -> Awaited:
        if self.every[index].on_host:
            return replace(asked, lse=None)
        layer = self.layers[index]
        asked = replace(asked, kept=layer.storage, head_offsets=layer.head_offsets)
        self._restore(index, self.every[index])
        return asked

    def follow(self, rows: Mapping[int, Rows]) -> None:
        """Note the query rows of the answers' newest token: layer -> its tensors q, out and lse, as in `Awaited`."""
        self.answers = [each and each.followed(rows, row) for row, each in enumerate(self.answers)]

    @property
    def since(self) -> np.ndarray:
        """int [B] number of tokens of each row's answer; -1 if the row attends to kept slots. [] if all rows do."""
        return np.array([-1 if each is None else len(each.tokens) for each in self.answers], np.int64)

    @property
    def awaits(self) -> bool:
        """Whether some batch row's answer attends to the slots of all tokens and has not chosen among them yet."""
        return bool(self.answers)

    def choosing(self) -> tuple[list[int], list[int]]:
        """Return (batch rows whose answer chooses slots after its next token, by `Policy.recall_after`; the other batch
        rows). Both lists are empty if no answer is still to choose."""
        due = self.since == self.sequence.policy.answered - 1 if self.answers else np.zeros(0, bool)
        return np.flatnonzero(due).tolist(), np.flatnonzero(~due).tolist()

    def choose(self) -> Iterator[tuple[int, Awaited]]:
        """End the answers' phase: yield (a layer that now has the slots of all tokens, what it kept and the query rows
        by which it is to choose). While a layer chooses, the next one's slots are copied from the host's memory."""
        answers = [each for each in self.answers if each is not None]
        away = [index for index, each in answers[0].asked.items() if each.kept is None]
        for index in away:
            self._append_last(index)
        if away:
            self.columns = self.sequence.columns
        coming = iter(away)
        self._come(next(coming, None))
        for index in answers[0].asked:
            self._come(next(coming, None))
            yield index, Awaited.joined([each.at(index) for each in answers])
        self.answers = []
        host.wait()

    def _come(self, index: int | None) -> None:
        if index is not None:
            self.recall(index, np.ones(len(self.answers), bool))

    def settle(self) -> None:
        """Let answers that are still to choose attend to the slots kept at the prompt's end and to those of the
        answer's tokens."""
        answers, self.answers = self.answers, []
        for index, layer in self.layers.items() if answers else ():
            asked = [each and each.asked[index] for each in answers]
            if all(each is None or each.kept is None for each in asked):
                continue
            rows = [layer.storage.aliased([row]) for row in range(len(answers))]
            for row, (each, own) in enumerate(zip(answers, asked, strict=True)):
                if each is not None and own is not None and own.kept is not None:
                    since = rows[row].last(len(each.tokens))
                    rows[row] = own.kept.moved(own.kept.grown(own.kept.counts + since.counts)).followed_by(since)
            layer.hold(joined(rows), together([each and each.head_offsets for each in asked]))

    def end(self) -> None:
        """Free the slots of all tokens, since no turn follows, except in layers whose answer is still to choose from
        them."""
        asked = [each.asked for each in self.answers if each is not None]
        away = {index for each in asked for index, one in each.items() if one.kept is None}
        self.every = {index: every for index, every in self.every.items() if index in away}

    # -- all slots, for reading -------------------------------------------------------------------------------------

    def kept(self, index: int) -> Storage:
        """Return the slots that layer `index` kept at its last cut, even while they are put aside, for reading only."""
        kept, storage = [each and each.asked[index].kept for each in self.answers], self.layers[index].storage
        if all(each is None for each in kept):
            return storage
        return joined([storage.aliased([row]) if one is None else one for row, one in enumerate(kept)])

    def whole(self, index: int) -> Storage:
        """Return the slots of all tokens in layer `index`, those decoded since the last read included, for a fork."""
        layer = self.layers[index]
        return here(layer, followed(layer, forked(self.every[index]), self._since))

    def pieces(self, index: int) -> list[Every]:
        """Return the slots of all tokens in layer `index` as a list of storages in the order of their tokens: the kept
        slots if there are no others."""
        layer = self.layers[index]
        if index not in self.every:
            return [layer.storage]
        every = self.every[index].centred_as(layer.storage)
        if every.on_host:
            host.wait()  # for rows that are still on their way there
        return [every, last(layer, every, self._since)] if self._since else [every]

    def tensors(self) -> tuple:
        """Return all tensors that take up memory beside the layers."""
        return tuple(x for each in (*self.every.values(), *self.answers) if each is not None for x in each.tensors())

    # -- changes of the batch and of its tokens ---------------------------------------------------------------------

    def crop(self, count: int) -> None:
        """Remove the last `count` tokens, before `Sequence.crop` does."""
        gone = count - self._since  # number of removed tokens that are in `every`
        if gone > 0:  # crop a fork, since other caches may share the slots
            self.every = {index: every.as_prefix().crop(gone) for index, every in self.every.items()}
            self.columns -= gone
        self.answers = [each and each.crop(count) for each in self.answers]

    def select(self, rows: list[int]) -> None:
        """Keep the batch rows `rows`, in this order; a batch row may occur twice."""
        self.every = {index: every.forked().rows(rows) for index, every in self.every.items()}  # beams share the slots
        answers = [self.answers[row] for row in rows] if self.answers else []
        self.answers = answers if any(answers) else []

    @classmethod
    def joined(cls, each: Items[Tiers], sequence: Sequence, layers: dict[int, EvictionLayer]) -> Tiers:
        """Concatenate the batch rows. `append_last` must have been called where one of them has slots of all tokens."""
        whole = cls(sequence, layers)
        whole.columns = sequence.columns
        whole.every = {index: Apart.of([one.every[index] for one in each]) for index in each[0].every}
        if any(one.awaits for one in each):
            none = [[None] * len(one.sequence.seen) for one in each]  # type: ignore[arg-type]  # none is empty
            whole.answers = [row for one, no in zip(each, none, strict=True) for row in one.answers or no]
        return whole

    def _restore(self, index: int, every: Every) -> None:
        layer = self.layers[index]
        layer.hold(here(layer, forked(every)))
