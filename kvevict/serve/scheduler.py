"""The thread that owns the model. In turn, a chunk of a prompt is read, and each running answer gets a token."""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any

import torch

from ..answering.batch import Batch
from ..answering.writing import step
from ..engine.hook.installed import using
from ..engine.memory.cache import EvictionCache
from ..engine.memory.joining import go_on
from ..engine.read.plan import Plan
from ..engine.read.step import Step
from ..models.families import base_model, find_decoder
from .call import Call
from .errors import Refused
from .prefixes import Prefixes
from .row import Row


@dataclass(eq=False)
class Turn:
    """Work that waits for the model.

    work  a function; one that reads is a generator of all `Step`s but the last
    call  the call that waits; None: the server waits
    rows  number of answers that start to run with the turn
    size  most bytes of these answers' slots
    """

    work: Callable
    call: Call | None = None
    rows: int = 0
    size: int = 0
    result: Future = field(default_factory=Future)
    context: Context = field(default_factory=Context)  # all of the work runs in it
    steps: Any = None  # the generator, while it reads
    left: int = 0  # rows that are left to read
    chunk: int = 0  # rows of the last chunk, less the rows of prompts that were read since
    alone: bool = True  # whether no other prompt was read since the last chunk

    @property
    def most(self) -> int:
        """Most tokens of another prompt that may be read before the next chunk: half of what is left. Several prompts
        may be read in between, with as many tokens in all as the last chunk had."""
        return self.left // 2 if self.alone else min(self.left // 2, self.chunk)

    @property
    def owner(self) -> str | None:
        return None if self.call is None else self.call.owner


class Scheduler:
    """Runs the model in a separate thread.

    prefixes  the stored prefixes; an answer that needs more memory than these may take runs alone
    most      most answers that run at once
    queue     most calls that wait beside the running ones
    """

    stall = 0.5  # seconds since the answers' last token after which a read pauses at its next layer

    def __init__(self, model: Any, prefixes: Prefixes, most: int, queue: int) -> None:
        self.model, self.prefixes, self.most, self.queue = model, prefixes, most, queue
        self.memory = prefixes.memory  # most bytes of all answers' slots
        self._turns: list[Turn] = []
        self._inside: list[Turn] = []  # turns whose prompt is being read, or whose answers run
        self._groups: list[Group] = []
        self._plans: deque[Plan] = deque(maxlen=8)  # plans of earlier groups, which know whether tokens can be recorded
        self._reading: list[Turn] = []  # turns between two chunks; each interrupted the one before it
        self._calls, self._changed = 0, threading.Condition()
        self._stepped = 0.0  # when answers had their last token, by time.monotonic()
        threading.Thread(target=self._run, name="kvevict", daemon=True).start()

    # -- in any thread ----------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Number of turns that somebody waits for."""
        return sum(turn.call is None or not turn.call.cancelled for turn in list(self._turns))

    @property
    def running(self) -> int:
        """Number of answers that are being written."""
        return sum(len(group.batch.rows) for group in self._groups)

    def enter(self) -> None:
        """Count a call that comes in, until `leave`. Raises Refused when there are too many calls."""
        with self._changed:
            if self._calls >= self.most + self.queue:
                raise Refused(429, f"{self._calls} requests are here already: try again later", "queue_full")
            self._calls += 1

    def leave(self) -> None:
        with self._changed:
            self._calls -= 1

    def submit(self, work: Callable[..., Any], *args: Any, **facts: Any) -> Future:
        """Run work(*args) in the thread that owns the model; returns its future. facts: fields of its `Turn`."""
        turn = Turn(lambda: work(*args), **facts)
        with self._changed:
            self._turns.append(turn)
            self._changed.notify()
        return turn.result

    # -- in the thread that owns the model --------------------------------------------------------------------------

    def run(self, row: Row, plan: Plan, cache: EvictionCache) -> None:
        """Let an answer be written from the next step on. plan: of decoded tokens; cache: of the answer's prompt."""
        for group in self._groups:
            if group.plan.policy == plan.policy and group.add(row, cache):
                return
        known = next((each for each in self._plans if each.policy == plan.policy), None)
        if known is None:
            self._plans.append(plan)
        group = Group(self.model, known or plan)
        group.add(row, cache)
        self._groups.append(group)

    def pause(self) -> None:
        """Give answers a token between two layers of a read, when it is time."""
        if self._groups and time.monotonic() - self._stepped >= self.stall:
            Context().run(self._step)

    def _run(self) -> None:
        torch.set_grad_enabled(False)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._turns or self._groups or self._reading)
            turn = self._next()
            if turn is not None:
                self._go_on(turn)
            Context().run(self._step)

    def _next(self) -> Turn | None:
        """Return the turn that goes on: one that waits, or the one whose prompt is being read; None without either."""
        reading = self._reading[-1] if self._reading else None
        turn = self._waiting(None if reading is None else reading.most)
        if turn is None:
            return reading
        if reading is not None:
            reading.chunk, reading.alone = reading.chunk - self._left(turn), False
        return turn

    def _waiting(self, most: int | None) -> Turn | None:
        """Take the next turn out of the queue: among turns that read at most `most` tokens, the first of the owner with
        the fewest running answers. None: no turn fits."""
        with self._changed:
            turns = [each for each in self._turns if most is None or self._left(each) <= most]
            served = Counter(each.owner for each in self._inside)
            turn = min(turns, key=lambda each: served[each.owner] if each.rows else 0, default=None)
            if turn is None or not self._fits(turn):
                turn = next((each for each in turns if each.rows == 0 or each.call.cancelled), None)
            if turn is not None:
                self._turns.remove(turn)
            return turn

    def _left(self, turn: Turn) -> int:
        """Number of tokens that a turn has to read: its prompt after a stored prefix. Repeated tokens count twice."""
        if turn.call is None:
            return 0
        call = turn.call
        known = (end for end in reversed(call.keys) if self.prefixes.knows(call.keys[end]))
        left = len(call.whole.ids) - max(call.stored_tokens, next(known, 0))
        return 2 * left if call.policy.rows.repeats else left

    def _fits(self, turn: Turn) -> bool:
        inside = [each for each in self._inside if each.rows]
        rows, size = sum(each.rows for each in inside), sum(each.size for each in inside)
        return not turn.rows or not inside or (rows + turn.rows <= self.most and size + turn.size <= self.memory)

    def _go_on(self, turn: Turn) -> None:
        """Do a turn's work, or a chunk of it."""
        if turn not in self._inside:
            self._inside.append(turn)
            if turn.call is not None:
                turn.call.running = True
        try:
            step = turn.context.run(self._work, turn)
        except BaseException as error:
            turn.result.set_exception(error)
            step = None
        if turn in self._reading:
            self._reading.remove(turn)
        if step is None:
            self._leave()
        else:
            turn.left, turn.chunk, turn.alone = step.ahead, step.positions.shape[1], True
            self._reading.append(turn)

    def _work(self, turn: Turn) -> Step | None:
        """Do a turn's work, and return the chunk that was read; None: the turn is done."""
        result = turn.work() if turn.steps is None else turn.steps
        if isinstance(result, Generator):
            turn.steps = result
            try:
                return next(turn.steps)
            except StopIteration as end:
                result = end.value
        turn.result.set_result(result)
        return None

    def _step(self) -> None:
        choosing = [alone for group in self._groups for alone in group.choosing()]
        for group in [*self._groups, *choosing]:
            if group.batch.rows:
                group.step()
        self._groups = [group for group in self._groups if group.batch.rows]
        for alone in choosing:
            for row in alone.batch.rows:  # one row, unless it has ended
                alone.batch.cache.end_archive()
                self.run(row, alone.plan, alone.batch.cache)
        self._stepped = time.monotonic()
        self._leave()

    def _leave(self) -> None:
        """Drop turns whose last answer has ended."""
        run = {row.call for group in self._groups for row in group.batch.rows}
        self._inside = [each for each in self._inside if not each.result.done() or each.call in run]


class Group:
    """Answers that one policy writes, a token of each in a step."""

    def __init__(self, model: Any, plan: Plan) -> None:
        self.model, self.plan, self.batch = model, plan, Batch(model)

    def add(self, row: Row, cache: EvictionCache) -> bool:
        """Add an answer. Return False if it cannot share a step with the others, or should not: answers that have
        chosen their slots are recorded until others join."""
        there, awaits = self.batch.cache, cache.sequence.awaits
        if there is not None and (there.sequence.awaits != awaits or (awaits and not go_on([there, cache]))):
            return False
        try:
            self.batch.add(row, cache)
        except ValueError:
            if not self.batch.rows:
                raise
            return False
        return True

    def choosing(self) -> list["Group"]:
        """Take out the answers whose next token chooses their slots (`Policy.recall_after`), each as its own group."""
        due = [] if self.batch.cache is None else self.batch.cache.sequence.choosing()[0]
        rows = [self.batch.rows[at] for at in due]
        groups = [Group(self.model, self.plan) for _ in rows]
        for group, row in zip(groups, rows, strict=True):
            group.add(row, self.batch.remove(row))
        return groups

    def step(self) -> None:
        rows = self.batch.rows
        try:
            with using(base_model(self.model), find_decoder(self.model), self.plan):
                step(self.batch)
        except Exception as error:
            for row in rows:
                row.fail(error)
            self.batch.keep([])
