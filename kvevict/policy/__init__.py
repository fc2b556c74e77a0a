"""Eviction policies: `Policy`, its presets and its parts. They are imported when one of them is used."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .parts import PARTS
    from .policy import Policy, build
    from .presets import PRESETS

__all__ = ["PARTS", "PRESETS", "Policy", "build"]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in __all__:
        return getattr(importlib.import_module(f"{__name__}.policy"), name)
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
