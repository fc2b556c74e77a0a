"""The thread that owns the model: alternately it reads a chunk of a prompt, and writes a token of each answer."""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import Module

from ..answering.batch import Batch
from ..answering.writing import step
from ..engine.hook.installed import using
from ..engine.memory.cache import EvictionCache
from ..engine.memory.joining import go_on
from ..engine.read.plan import Plan
from ..engine.read.step import Step
from ..models.families import base_model, find_decoder
from .call import Call
from .prefixes import Prefixes
from .row import Row


@dataclass(eq=False)
class Turn:
    """Work that waits for the model."""

    work: Callable[[], Any]  # returns a result, or reads: then it returns a generator of all `Step`s but the last
    call: Call | None = None  # the call that waits; None: the server waits
    rows: int = 0  # number of answers that the turn starts
    size: int = 0  # most bytes of these answers' slots
    result: Future = field(default_factory=Future)
    context: Context = field(default_factory=Context)  # the context variables with which the work runs
    steps: Generator[Step, None, Any] | None = None  # the generator, once the work reads
    left: int = 0  # tokens that are left to read
    chunk: int = 0  # tokens of the last chunk, less the tokens of other prompts that were read since
    alone: bool = True  # whether no other prompt was read since the last chunk

    @property
    def most(self) -> int:
        """The most tokens of another prompt that is read before the next chunk: half of what is left for one prompt;
        several prompts between two chunks have at most as many tokens, in sum, as the last chunk."""
        return self.left // 2 if self.alone else min(self.left // 2, self.chunk)

    @property
    def owner(self) -> str | None:
        return None if self.call is None else self.call.owner


class Scheduler:
    """Runs the model in a separate thread, for at most `most` answers at once."""

    stall = 0.5  # seconds without a token of the answers after which a read pauses at its next layer

    def __init__(self, model: Module, prefixes: Prefixes, most: int) -> None:
        self.model, self.prefixes, self.most = model, prefixes, most
        self.memory = prefixes.memory  # most bytes of the slots of all answers, unless one answer alone needs more
        self._turns: list[Turn] = []  # turns that have not begun
        self._inside: list[Turn] = []  # turns that read, or whose answers run
        self._groups: list[Group] = []
        self._plans: deque[Plan] = deque(maxlen=8)  # of earlier groups: a plan remembers whether it can be recorded
        self._reading: list[Turn] = []  # turns between two chunks; each has interrupted the one before it
        self._changed = threading.Condition()  # notified of a new turn
        self._stepped = 0.0  # time.monotonic() of the answers' last token
        threading.Thread(target=self._run, name="kvevict", daemon=True).start()

    # -- in any thread ----------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """The number of turns that have not begun, without those of cancelled calls."""
        return sum(turn.call is None or not turn.call.cancelled for turn in list(self._turns))

    @property
    def running(self) -> int:
        """The number of answers that are being written."""
        return sum(len(group.batch.rows) for group in self._groups)

    def submit(self, work: Callable[..., Any], *args: Any, **facts: Any) -> Future:
        """Run work(*args) in the model's thread, and return a future of its result. facts: further fields of `Turn`."""
        turn = Turn(lambda: work(*args), **facts)
        with self._changed:
            self._turns.append(turn)
            self._changed.notify()
        return turn.result

    # -- in the thread that owns the model --------------------------------------------------------------------------

    def run(self, row: Row, plan: Plan, cache: EvictionCache) -> None:
        """Let an answer be written from the next step on. plan: of its decoded tokens; cache: of its prompt."""
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
        """Write a token of each answer, between two layers of a read, if the last token is `stall` seconds old."""
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
        """Return the turn to work on: one that begins, or else the newest that reads; None without either."""
        reading = self._reading[-1] if self._reading else None
        turn = self._waiting(None if reading is None else reading.most)
        if turn is None:
            return reading
        if reading is not None:
            reading.chunk, reading.alone = reading.chunk - self._left(turn), False
        return turn

    def _waiting(self, most: int | None) -> Turn | None:
        """Take a turn that reads at most `most` tokens out of the queue: the first of the owner with the fewest running
        answers. None if no turn fits."""
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
        """Count the tokens that a turn has to read, after a stored prefix; twice where the policy repeats them."""
        if turn.call is None:
            return 0
        call = turn.call
        known = (end for end in reversed(call.keys) if self.prefixes.knows(call.keys[end]))
        left = len(call.whole.ids) - max(call.stored_tokens, next(known, 0))
        return 2 * left if call.policy.rows.repeats else left

    def _fits(self, turn: Turn) -> bool:
        """Return whether a turn's answers can run beside the others."""
        inside = [each for each in self._inside if each.rows]
        rows, size = sum(each.rows for each in inside), sum(each.size for each in inside)
        return not turn.rows or not inside or (rows + turn.rows <= self.most and size + turn.size <= self.memory)

    def _go_on(self, turn: Turn) -> None:
        """Do a turn's work, or its next chunk."""
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
        """Do a turn's work, or read its next chunk and return the chunk's step; None once the turn is done."""
        result = turn.work() if turn.steps is None else turn.steps
        if isinstance(result, Generator):
            turn.steps = result
            try:
                return next(result)
            except StopIteration as end:
                result = end.value
        turn.result.set_result(result)
        return None

    def _step(self) -> None:
        """Write a token of each answer."""
        choosing = [alone for group in self._groups for alone in group.choosing()]
        for group in [*self._groups, *choosing]:
            if group.batch.rows:
                group.step()
        self._groups = [group for group in self._groups if group.batch.rows]
        for alone in choosing:
            for row in alone.batch.rows:  # one row, or none if it has ended
                alone.batch.cache.end_archive()
                self.run(row, alone.plan, alone.batch.cache)
        self._stepped = time.monotonic()
        self._leave()

    def _leave(self) -> None:
        """Forget the turns whose last answer has ended."""
        run = {row.call for group in self._groups for row in group.batch.rows}
        self._inside = [each for each in self._inside if not each.result.done() or each.call in run]


class Group:
    """The answers of one policy, which share each step of the model."""

    def __init__(self, model: Module, plan: Plan) -> None:
        self.model, self.plan, self.batch = model, plan, Batch(model)

    def add(self, row: Row, cache: EvictionCache) -> bool:
        """Add an answer, and return True; False if it cannot share a step with the others, or should not, as answers
        that have chosen their slots have recorded steps, which end when others join."""
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
        """Take out the answers whose next token chooses their slots (`Policy.recall_after`), as a group each."""
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
