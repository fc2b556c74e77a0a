"""LookaheadKV (METHODS section 6): trained rows that read along behind a prompt and say which of its slots to keep."""

from ..policy.adapter import Adapter, bundled, config_of, load
from .training import train

__all__ = ["Adapter", "bundled", "config_of", "load", "train"]
