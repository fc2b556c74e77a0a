"""The state of a running model call, in its thread or task.

There is one context variable. Each call runs in a copy of the context, so its changes end with it, also after an error.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, eq=False)
class Context:
    outer: Any = None  # the kvevict.engine.read.step.OuterCall around the decoder's
    step: Any = None  # the kvevict.engine.read.step.Step that runs
    question: Any = None  # the kvevict.asking.question.Finder that observes the prompts that are read
    asks: bool = True  # whether an answer follows what is read, whose first tokens attend to all slots
    learns: bool = True  # whether the policy may learn from what is read, for later reads
    watchers: tuple = ()  # kvevict.engine.watch.watcher's, called with every layer and chunk of a read
    pause: Any = None  # called before each layer of a read; it may decode tokens of other caches
    few_rows: bool = False  # whether the model's call has products for `kvevict.ops.few_rows`
    ready: Any = None  # (a decoder, its output), in place of the decoder's next call
    note: Any = None  # note(module, query, key): called in unpatched attention
    training_attention: Any = None  # the attention function of `kvevict.lookahead.passes`
    plans: dict = field(default_factory=dict)  # kvevict.engine.hook.installed.Installed: the Plan of calls made here
    adapter: Any = None  # the token of the `kvevict.models.adapter.Adapter.on` that is active


_context: ContextVar = ContextVar("kvevict", default=Context())  # noqa: B039  immutable


def context() -> Context:
    return _context.get()


def current() -> Any:
    """The `Step` that runs, or None."""
    return _context.get().step


def enter(**changes: Any) -> None:
    """Change these fields of the context for the rest of this call."""
    _context.set(replace(_context.get(), **changes))


@contextlib.contextmanager
def within(**changes: Any) -> Iterator[None]:
    """Inside, the context has these fields changed."""
    token = _context.set(replace(_context.get(), **changes))
    try:
        yield
    finally:
        _context.reset(token)
