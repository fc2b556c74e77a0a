"""The inputs of a policy's parts: the engine's values, for annotations alone, and quantities of slots by name. At run
time each of the engine's values is `Any`: a policy imports nothing of the engine."""

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ..engine.measure.observation import CallRows as CallRows
    from ..engine.measure.observation import LayerRows as LayerRows
    from ..engine.measure.observation import Observation as Observation
    from ..engine.measure.observation import Observers as Observers
    from ..engine.measure.slots import Slots as Slots
    from ..engine.read.schedule import Chunk as Chunk
    from .policy import Policy as Policy
else:
    CallRows = LayerRows = Observation = Observers = Slots = Chunk = Policy = Any


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
