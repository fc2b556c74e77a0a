"""Gates (METHODS section 9): trained functions of a token's hidden state that predict the worth of its slots. Each is
imported when it is used."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..engine.measure.gates import Gates, load
    from .kvzap import convert
    from .training import train

__all__ = ["Gates", "convert", "load", "train"]
_GATES = "..engine.measure.gates"
_PLACES = {"Gates": _GATES, "load": _GATES, "convert": ".kvzap", "train": ".training"}


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(importlib.import_module(_PLACES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
