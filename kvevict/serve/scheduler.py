"""Runs the model in one thread, which alternately reads a chunk of a prompt and decodes a token of each answer."""

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
from ..answering.writing import Drafted, step
from ..context import within
from ..engine.hook.ahead import Ahead
from ..engine.hook.installed import using
from ..engine.memory.cache import EvictionCache
from ..engine.memory.joining import go_on, one_prefix
from ..engine.read.plan import Plan
from ..engine.read.step import Step
from ..models.families import base_model, find_decoder
from .call import Call
from .prefixes import Prefixes
from .row import Row


@dataclass(eq=False)
class Turn:
    """Work for the model's thread, such as to read a prompt and start its answers."""

    work: Callable[[], Any]  # returns the result; or, to read a prompt, a generator of each chunk's step but the last
    call: Call | None = None  # the call that the work is for; None: the work is the server's own
    rows: int = 0  # number of answers that the work starts
    size: Callable[[], int] = lambda: 0  # returns the most bytes of the slots of these answers, as of now
    result: Future = field(default_factory=Future)
    context: Context = field(default_factory=Context)  # the context variables with which the work runs
    steps: Generator[Step, None, Any] | None = None  # the generator that `work` returned; None: none yet
    left: int = 0  # number of the prompt's tokens that are not yet read
    chunk: int = 0  # tokens of this prompt's last chunk, minus the tokens of other prompts read after it
    alone: bool = True  # whether no other prompt was read after this prompt's last chunk

    @property
    def most(self) -> int:
        """The most tokens of another prompt that may be read before this prompt's next chunk. The first other prompt
        may have half as many tokens as this prompt has left. Further prompts are only read while all other prompts
        together have at most as many tokens as this prompt's last chunk."""
        return self.left // 2 if self.alone else min(self.left // 2, self.chunk)

    @property
    def owner(self) -> str | None:
        return None if self.call is None else self.call.owner


class Scheduler:
    """Runs the model in a separate thread, and decodes at most `most` answers at once."""

    stall = 0.5  # seconds: a chunk pauses between two layers for a token of each answer if the last token is older

    def __init__(self, model: Module, prefixes: Prefixes, most: int) -> None:
        self.model, self.prefixes, self.most = model, prefixes, most
        self.memory = prefixes.memory  # most bytes of all answers' slots; a turn that runs alone may take more
        self._turns: list[Turn] = []  # turns that have not begun
        self._inside: list[Turn] = []  # turns that have begun: they read a prompt, or their answers are decoded
        self._groups: list[Group] = []
        # Plans of earlier groups. New groups reuse a plan, which knows whether its decode steps can be recorded.
        self._plans: deque[Plan] = deque(maxlen=8)
        self._reading: list[Turn] = []  # turns with chunks left to read; each has interrupted the one before it
        self._changed = threading.Condition()  # notified when a turn is submitted
        self._stepped = 0.0  # time.monotonic() when the last token of the answers was decoded
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
        """Have the model's thread run work(*args), and return a future of its result. facts: values of other fields of
        the `Turn`."""
        turn = Turn(lambda: work(*args), **facts)
        with self._changed:
            self._turns.append(turn)
            self._changed.notify()
        return turn.result

    # -- in the thread that owns the model --------------------------------------------------------------------------

    def run(self, row: Row, plan: Plan, cache: EvictionCache) -> None:
        """Add an answer to those that are decoded, from the next step on. plan: the plan of its policy; cache: the
        cache of its prompt."""
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
        """Decode a token of each answer if the last token is at least `stall` seconds old. The reading of a chunk calls
        this between two layers."""
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
        """Return the turn to work on: a waiting turn if one may begin, else the last turn of `_reading`; None if there
        is no such turn either."""
        reading = self._reading[-1] if self._reading else None
        turn = self._waiting(None if reading is None else reading.most)
        if turn is None:
            return reading
        if reading is not None:
            reading.chunk, reading.alone = reading.chunk - self._left(turn), False
        return turn

    def _waiting(self, most: int | None) -> Turn | None:
        """Remove the next turn from the queue, and return it; None if no turn can begin. Only turns with at most `most`
        tokens to read count (None: any number). Turns of owners with fewer begun turns go first, and so do turns that
        start no answers."""
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
        """Count the tokens that a waiting turn has to read: those of its prompt after the longest stored prefix, twice
        as many if the policy repeats the prompt."""
        if turn.call is None:
            return 0
        call = turn.call
        left = len(call.whole.ids) - max(call.stored_tokens, self.prefixes.known(*call.beginnings))
        return 2 * left if call.policy.rows.repeats else left

    def _fits(self, turn: Turn) -> bool:
        """Return whether a turn's answers fit, in number and bytes of slots, beside those of the turns that have
        begun."""
        inside = [each for each in self._inside if each.rows]
        if not turn.rows or not inside:
            return True
        rows, size = sum(each.rows for each in inside), sum(each.size() for each in inside)
        return rows + turn.rows <= self.most and size + turn.size() <= self.memory

    def _go_on(self, turn: Turn) -> None:
        """Run a turn's work, or its next chunk if the work reads a prompt."""
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
        """Run a turn's work. If it reads a prompt, read only the next chunk, and return the chunk's step; None once the
        work is done."""
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
        """Decode a token of each answer."""
        choosing = [alone for group in self._groups for alone in group.choosing()]
        for group in [*self._groups, *choosing]:
            if group.batch.rows:
                group.step()
        self._groups = [group for group in self._groups if group.batch.rows]
        for alone in choosing:
            for row in alone.batch.rows:  # one row, or none if its answer has ended
                alone.batch.cache.tiers.end()
                self.run(row, alone.plan, alone.batch.cache)
        self._stepped = time.monotonic()
        self._leave()

    def _leave(self) -> None:
        """Remove the turns whose work is done and whose answers have all ended."""
        run = {row.call for group in self._groups for row in group.batch.rows}
        self._inside = [each for each in self._inside if not each.result.done() or each.call in run]


class Group:
    """Answers of one policy that are decoded together: a step of the model gives each of them a token. A checked answer
    (`Policy.recall_check`) is decoded alone: another token than the drafted one would end the drafts of all."""

    def __init__(self, model: Module, plan: Plan) -> None:
        self.model, self.plan, self.batch = model, plan, Batch(model)
        check = plan.policy.recall_check
        self.ahead = None if check is None else Ahead(check, plan, Drafted(self.batch))

    def add(self, row: Row, cache: EvictionCache) -> bool:
        """Add an answer, and return True; or return False if it cannot share a step with the group's answers, or would
        disturb them (`Policy.recall_after`): answers that attend to the slots of all tokens until they choose must be
        able to continue to do so (`go_on`), and answers that have chosen their slots have recorded steps, which would
        end. Nor are answers about texts in different files added, whose slots would be copied (`one_prefix`)."""
        there, awaits = self.batch.cache, cache.tiers.awaits
        if self.ahead is not None and self.batch.rows:
            return False
        shares = go_on if awaits else one_prefix  # `go_on` asks `one_prefix`, too
        if there is not None and (there.tiers.awaits != awaits or not shares([there, cache])):
            return False
        try:
            self.batch.add(row, cache)
        except ValueError:
            if not self.batch.rows:
                raise
            return False
        return True

    def choosing(self) -> list["Group"]:
        """Remove the answers that choose their slots after their next token (`Policy.recall_after`), and return a
        separate group for each of them."""
        due = [] if self.batch.cache is None else self.batch.cache.tiers.choosing()[0]
        rows = [self.batch.rows[at] for at in due]
        groups = [Group(self.model, self.plan) for _ in rows]
        for group, row in zip(groups, rows, strict=True):
            group.add(row, self.batch.remove(row))
        return groups

    def step(self) -> None:
        rows = self.batch.rows
        try:
            with using(base_model(self.model), find_decoder(self.model), self.plan), within(ahead=self.ahead):
                step(self.batch)
        except Exception as error:
            for row in rows:
                row.fail(error)
            self.batch.keep([])
