"""What a call of a model knows of itself, in the thread or task that runs it.

There is one context variable. Each call runs in a copy of the context, so what it enters is gone however it ends.
"""

import contextlib
from contextvars import ContextVar
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, eq=False)
class Context:
    outer: object = None  # the kvevict.engine.read.step.OuterCall around the decoder's
    step: object = None  # the kvevict.engine.read.step.Step that runs
    tap: object = None  # the kvevict.engine.hook.replay.Call that attention is remembered in, or comes from
    question: object = None  # the kvevict.question.Question that observes the prompts that are read
    watchers: tuple = ()  # of kvevict.engine.watch.watcher, given every layer of a read
    note: object = None  # note(module, query, key) is called with what unpatched calls attend with
    training_attention: object = None  # what `kvevict.lookahead.passes` calls for attention
    patches: dict = field(
        default_factory=dict
    )  # kvevict.engine.hook.installed.Installed -> the Patch of calls made here
    adapter: object = None  # the token of the `kvevict.policy.adapter.Adapter.on` that is active


_context: ContextVar = ContextVar("kvevict", default=Context())  # noqa: B039  immutable


def context() -> Context:
    return _context.get()


def current():
    """The `Step` that runs, or None."""
    return _context.get().step


def enter(**changes) -> None:
    """What follows in this call sees a context with these fields changed."""
    _context.set(replace(_context.get(), **changes))


@contextlib.contextmanager
def within(**changes):
    """Inside, the context has these fields changed."""
    token = _context.set(replace(_context.get(), **changes))
    try:
        yield
    finally:
        _context.reset(token)
