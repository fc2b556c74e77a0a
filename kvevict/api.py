"""Holds the public names of `kvevict`, which imports this module at the first use of one of them. Each import is
written `X as X`, since type checkers treat other imports as private."""

from collections.abc import Callable
from typing import Any, TypeVar

from .answering.answer import Pipeline as Pipeline
from .answering.answer import answer as answer
from .answering.answer import read as read
from .answering.calibration import Calibration as Calibration
from .answering.calibration import calibrate as calibrate
from .answering.chat import Chat as Chat
from .asking.question import observing as observing
from .engine.measure.quantities import QUANTITIES as QUANTITIES
from .engine.measure.quantities import Quantity as Quantity
from .engine.measure.quantities import check_needs
from .models.loading import small_llama as small_llama
from .ops import _ops  # noqa: F401  importing it checks torch and loads the kernels
from .patch import evicting as evicting
from .patch import patch as patch
from .patch import unpatch as unpatch
from .policy.heads import HEADS as HEADS
from .policy.heads import HeadBudget as HeadBudget
from .policy.history import history as history
from .policy.inputs import need as need
from .policy.layers import LAYERS as LAYERS
from .policy.layers import LayerBudget as LayerBudget
from .policy.policy import Policy as Policy
from .policy.presets import PRESETS as PRESETS
from .policy.refinements import REFINEMENTS as REFINEMENTS
from .policy.refinements import Refinement as Refinement
from .policy.rows import ROWS as ROWS
from .policy.rows import Rows as Rows
from .policy.scores import SCORES as SCORES
from .policy.scores import Score as Score
from .policy.selections import SELECTIONS as SELECTIONS
from .policy.selections import Selection as Selection
from .report import report as report
from .store.loading import load_cache as load_cache
from .store.saving import save_cache as save_cache
from .train.query_statistics import measure_queries as measure_queries

_Class = TypeVar("_Class", bound=type)


def policies() -> list[str]:
    """List the names of the presets that `kvevict.patch` takes."""
    return sorted(PRESETS)


def register_score(name: str) -> Callable[[_Class], _Class]:
    """Return a decorator that registers a subclass of `Score` under a name, which policies, their JSON and the command
    line then accept. Raises ValueError for a taken name and for unknown quantities."""

    def register(score: Any) -> Any:
        check_needs(score)
        return SCORES.add(name)(score)

    return register


def register_quantity(name: str) -> Callable[[_Class], _Class]:
    """Return a decorator that registers a subclass of `Quantity` under a name, so that scores can need it."""
    return QUANTITIES.add(name)


def register_rows(name: str) -> Callable[[_Class], _Class]:
    """Return a decorator that registers a subclass of `Rows` under a name, which policies, their JSON and the command
    line then accept."""
    return ROWS.add(name)
