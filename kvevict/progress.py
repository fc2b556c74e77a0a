"""A progress bar around a loop."""

from collections.abc import Sequence
from typing import Any


def bar(items: Sequence[Any], what: str, unit: str, show: bool) -> Any:
    """The items, shown as they are taken, if there are several."""
    if not show or len(items) < 2:
        return items
    from tqdm import tqdm

    return tqdm(items, desc=what, unit=unit)
