"""Trains LookaheadKV's rows (METHODS section 6): learned rows after a prompt, whose attention scores its slots."""

from ...models.adapter import Adapter, bundled, config_of, load
from .training import train

__all__ = ["Adapter", "bundled", "config_of", "load", "train"]
