"""The inputs of a policy's parts: what a policy sees of a read, and quantities of slots by name."""

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

from .seen.rows import CallRows as CallRows
from .seen.rows import Chunk as Chunk
from .seen.rows import LayerRows as LayerRows
from .seen.rows import Observation as Observation
from .seen.rows import Observers as Observers
from .seen.slots import Slots as Slots

if TYPE_CHECKING:
    from .policy import Policy as Policy
else:
    Policy = Any  # its parts are imported first


class Need(NamedTuple):
    """A quantity of `kvevict.QUANTITIES` by its name, with options."""

    name: str
    options: tuple[Any, ...] = ()  # (option, value), sorted


def need(name: str, **options: Any) -> Need:
    return Need(name, tuple(sorted(options.items())))


@functools.cache
def as_needs(needs: Any) -> tuple[Any, ...]:
    """Return a part's `needs`, names and `Need`s, as `Need`s."""
    return tuple(Need(each) if isinstance(each, str) else each for each in needs)
