"""LookaheadKV (METHODS section 6): trained rows are appended to a prompt, and their attention scores its slots."""

from ...models.adapter import Adapter, bundled, config_of, load
from .training import train

__all__ = ["Adapter", "bundled", "config_of", "load", "train"]
