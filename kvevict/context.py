"""The state of a running model call, in its thread or task: one context variable. Each call runs in a copy of the
context, so its changes end with the call, also after an error."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, eq=False)
class Context:
    outer: Any = None  # the kvevict.engine.read.step.OuterCall around the decoder's call
    step: Any = None  # the kvevict.engine.read.step.Step that runs
    question: Any = None  # the kvevict.asking.question.Finder for the prompts that are read
    asks: bool = True  # whether an answer follows the prompt; the answer's first tokens attend to all slots
    learns: bool = True  # whether the policy may learn from a prompt for later reads
    watchers: tuple = ()  # each kvevict.engine.watch.watcher.Watcher is called with every layer and chunk of a read
    pause: Callable | None = None  # called before each layer of a read; it may decode tokens of other caches
    few_rows: bool = False  # whether `kvevict.ops.few_rows` may compute products of the model's call
    ready: tuple | None = None  # (a decoder, the output that stands in for the decoder's next call)
    note: Callable | None = None  # unpatched attention calls it with (module, query, key)
    training_attention: Any = None  # the attention function of `kvevict.train.lookahead.passes`
    plans: dict = field(default_factory=dict)  # {kvevict.engine.hook.installed.Installed: the Plan of its calls here}
    adapter: object = None  # the token of the `kvevict.models.adapter.Adapter.on` that is active


_context: ContextVar = ContextVar("kvevict", default=Context())  # noqa: B039  immutable


def context() -> Context:
    return _context.get()


def current() -> Any:
    """Return the `Step` that runs, or None."""
    return _context.get().step


def enter(**changes: Any) -> None:
    """Change fields of the context for the rest of this call."""
    _context.set(replace(_context.get(), **changes))


@contextlib.contextmanager
def within(**changes: Any) -> Iterator[None]:
    """Change fields of the context for a block."""
    token = _context.set(replace(_context.get(), **changes))
    try:
        yield
    finally:
        _context.reset(token)
