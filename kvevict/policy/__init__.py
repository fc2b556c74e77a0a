"""Eviction policies: `Policy`, its presets and its parts. They are imported when one of them is used."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .building import build
    from .parts import PARTS
    from .policy import Policy
    from .presets import PRESETS

__all__ = ["PARTS", "PRESETS", "Policy", "build"]
MODULES = {"PARTS": "parts", "PRESETS": "presets", "Policy": "policy", "build": "building"}


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in MODULES:
        return getattr(importlib.import_module(f"{__name__}.{MODULES[name]}"), name)
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
