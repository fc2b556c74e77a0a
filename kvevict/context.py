"""Holds the state of a running model call in one context variable, so that each thread and each asyncio task has its
own. A call runs in a copy of the context: its changes end with the call, even after an error."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, eq=False)
class Context:
    outer: Any = None  # the kvevict.engine.read.step.OuterCall: the model's call around the decoder's
    step: Any = None  # the running kvevict.engine.read.step.Step
    question: Any = None  # the kvevict.asking.question.Finder that finds the question in each prompt
    asks: bool = True  # whether an answer follows the prompt; the answer's first tokens may attend to all slots
    learns: bool = True  # whether the policy may learn from a prompt for later reads (TADA's history)
    watchers: tuple = ()  # kvevict.engine.watch.watcher.Watcher objects, called with every layer and chunk of a read
    pause: Callable | None = None  # called before each layer of a read; it may decode tokens of other caches meanwhile
    few_rows: bool = False  # whether `kvevict.ops.few_rows` may compute the call's linear layers
    ready: tuple | None = None  # (decoder, output): the decoder's next call returns this output, computed already
    note: Callable | None = None  # called with (module, query, key) by attention that runs unpatched
    training_attention: Any = None  # the attention function of `kvevict.train.lookahead.passes`
    plans: dict = field(default_factory=dict)  # {engine.hook.installed.Installed: the Plan of calls in this context}
    ahead: Any = None  # the kvevict.engine.hook.ahead.Ahead that answers calls with a token of the running answer
    adapter: object = None  # a unique object that identifies the active `kvevict.models.adapter.Adapter.on`


_context: ContextVar = ContextVar("kvevict", default=Context())  # noqa: B039  a Context is immutable


def context() -> Context:
    return _context.get()


def current() -> Any:
    """Return the `Step` that runs, or None."""
    return _context.get().step


def enter(**changes: Any) -> None:
    """Change fields of the context until the running call ends."""
    _context.set(replace(_context.get(), **changes))


@contextlib.contextmanager
def within(**changes: Any) -> Iterator[None]:
    """Change fields of the context within a `with` block."""
    token = _context.set(replace(_context.get(), **changes))
    try:
        yield
    finally:
        _context.reset(token)
