# ruff: noqa: F405  kvevict.api defines the names of __all__
"""KV-cache eviction for Hugging Face models: long prompts in bounded memory, answers from the kept slots.

`import kvevict` does not import torch, so that a command line is parsed without a wait. The first use of a public name
imports `kvevict.api`, which imports torch.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .version import VERSION

if TYPE_CHECKING:
    from .api import *  # noqa: F403

__version__ = VERSION
__all__ = [
    "HEADS", "LAYERS", "PRESETS", "QUANTITIES", "REFINEMENTS", "ROWS", "SCORES", "SELECTIONS", "Calibration", "Chat",
    "HeadBudget", "LayerBudget", "Pipeline", "Policy", "Quantity", "Refinement", "Rows", "Score", "Selection",
    "answer", "calibrate", "evicting", "history", "load_cache", "measure_queries", "need", "observing", "patch",
    "policies", "read", "register_quantity", "register_rows", "register_score", "report", "save_cache", "small_llama",
    "unpatch",
]  # fmt: skip


class _Package(ModuleType):
    def __getattr__(self, name: str) -> Any:
        """Return a public name or a submodule, on its first use. The first public name loads all of them."""
        if name in __all__:
            api = importlib.import_module(f"{__name__}.api")
            vars(self).update({each: getattr(api, each) for each in __all__})
            return vars(self)[name]
        if not name.startswith("__"):
            path = f"{__name__}.train.{name}" if name in ("gates", "lookahead") else f"{__name__}.{name}"
            try:
                return importlib.import_module(path)
            except ModuleNotFoundError as error:
                if error.name != path:
                    raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __setattr__(self, name: str, value: object) -> None:
        """Keep `kvevict.patch` the function: importing the module `kvevict.patch` would overwrite the function."""
        if not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> Any:
        return sorted({*vars(self), *__all__})


sys.modules[__name__].__class__ = _Package
