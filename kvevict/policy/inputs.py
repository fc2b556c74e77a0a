"""The inputs of a policy's parts: types of what a part sees of a read, names of the quantities that it needs, and the
policy that it belongs to."""

import functools
from typing import Any, NamedTuple, Protocol

from .seen.rows import CallRows as CallRows
from .seen.rows import Chunk as Chunk
from .seen.rows import LayerRows as LayerRows
from .seen.rows import Observation as Observation
from .seen.rows import Observers as Observers
from .seen.rows import PromptCall as PromptCall
from .seen.rows import PromptRead as PromptRead
from .seen.slots import Slots as Slots


class OwnPolicy(Protocol):
    """The attributes of a `kvevict.Policy` that its parts (such as a score) use."""

    @property
    def chunk_size(self) -> int | None: ...
    @property
    def layers(self) -> Any: ...  # the `LayerBudget`
    @property
    def protected(self) -> int: ...
    @property
    def shared(self) -> bool: ...
    def slots(self, tokens: int) -> int: ...
    def groups(self, layers: int) -> list[list[int]]: ...


class Need(NamedTuple):
    """The name and the options of a quantity of `kvevict.QUANTITIES` that a part of a policy needs."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()  # (option, value), sorted


Needs = tuple[str | Need, ...]  # quantities that a part of a policy gets: a name, or a `Need` if it has options


def need(name: str, **options: Any) -> Need:
    return Need(name, tuple(sorted(options.items())))


@functools.cache
def as_needs(needs: Needs) -> tuple[Need, ...]:
    """Return a part's `needs`, each of them as a `Need`."""
    return tuple(Need(each) if isinstance(each, str) else each for each in needs)
