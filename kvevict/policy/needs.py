"""The inputs of a policy's parts: quantities of a layer's slots, by name."""

import functools
from typing import Any, NamedTuple


class Need(NamedTuple):
    """A quantity of `kvevict.QUANTITIES` by its name, with options."""

    name: str
    options: tuple[Any, ...] = ()  # (option, value), sorted


def need(name: str, **options: Any) -> Need:
    return Need(name, tuple(sorted(options.items())))


@functools.cache
def as_needs(needs: Any) -> tuple[Any, ...]:
    """`needs` of a part, names and `Need`s, as `Need`s."""
    return tuple(Need(each) if isinstance(each, str) else each for each in needs)
