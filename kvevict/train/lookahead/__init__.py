"""Trains LookaheadKV's rows (METHODS section 6), which are appended to a prompt: their attention scores its slots."""

from ...models.adapter import Adapter, bundled, config_of, load
from .training import train

__all__ = ["Adapter", "bundled", "config_of", "load", "train"]
