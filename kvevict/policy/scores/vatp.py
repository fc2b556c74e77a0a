"""Attention times the 1-norm of the value."""

from dataclasses import dataclass
from typing import Any, ClassVar

from . import SCORES, Attention
from .h2o import H2O


@SCORES.add("vatp")
@dataclass(frozen=True)
class VATP(H2O):
    """VATP (Guo et al. 2024): H2O's sums times the 1-norm of the value; the first `sink` slots are kept."""

    sink: int = 20
    decodes: ClassVar[bool] = False
    factors: ClassVar[tuple[Any, ...]] = ("value_norm",)


@SCORES.add("paasvn")
@dataclass(frozen=True)
class PAASVN(Attention):
    """PAASVN (EDIE eq. 4), EDIE's baseline: SnapKV's sums times the 1-norm of the value, pooled."""

    factors: ClassVar[tuple[Any, ...]] = ("value_norm",)
