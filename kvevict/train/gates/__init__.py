"""Trains gates (METHODS section 9): functions of a token's hidden state that predict the scores of its slots."""

from ...engine.measure.gates import Gates, load
from .kvzap import convert
from .training import train

__all__ = ["Gates", "convert", "load", "train"]
