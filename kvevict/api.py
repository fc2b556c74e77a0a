# ruff: noqa: F401  kvevict has them
"""The public names of `kvevict`. It imports this module when the first of them is used."""

from collections.abc import Callable
from typing import TypeVar

from . import _ops  # checks torch and loads the kernels
from .answer import Pipeline, answer, read
from .engine.measure.quantities import QUANTITIES, Quantity, check_needs
from .models import small_llama
from .patch import evicting, patch, unpatch
from .policy.heads import HEADS, HeadBudget
from .policy.layers import LAYERS, LayerBudget
from .policy.layers.tada import history
from .policy.needs import need
from .policy.policy import PRESETS, Policy
from .policy.refinements import REFINEMENTS, Refinement
from .policy.rows import ROWS, Rows
from .policy.scores import SCORES, Score
from .policy.selections import SELECTIONS, Selection
from .query_statistics import measure_queries
from .question import observing
from .report import report
from .store import load_cache, save_cache

_Class = TypeVar("_Class", bound=type)


def policies() -> list[str]:
    """Names of the presets that `kvevict.patch` takes."""
    return sorted(PRESETS)


def register_score(name: str) -> Callable[[_Class], _Class]:
    """Decorator that registers a `Score` under a name, for policies, their JSON and the command line. Raises ValueError
    for a taken name and for unknown quantities."""

    def register(score):
        check_needs(score)
        return SCORES.add(name)(score)

    return register


def register_quantity(name: str) -> Callable[[_Class], _Class]:
    """Decorator that registers a `Quantity` under a name, so that scores can need it."""
    return QUANTITIES.add(name)


def register_rows(name: str) -> Callable[[_Class], _Class]:
    """Decorator that registers `Rows` under a name, for policies, their JSON and the command line."""
    return ROWS.add(name)
