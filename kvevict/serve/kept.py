"""The parts of a stored text that were kept, for the page at `/`."""

from typing import Any

import numpy as np

from ..engine.slots.adopt import EvictionCache
from ..engine.slots.cache import EvictionLayer
from ..prompts import pieces


def shares(cache: EvictionCache, start: int, stop: int) -> np.ndarray:
    """The share of all layers' heads that keep each of the positions start..stop-1 of a cache of one row."""
    counts, heads = np.zeros(stop), 0
    for layer in cache.layers:
        if isinstance(layer, EvictionLayer):
            for positions in layer.positions()[0]:
                counts[positions.cpu().numpy()] += 1
                heads += 1
    return counts[start:] / max(heads, 1)


def parts(tokenizer: Any, ids: list[int], found: np.ndarray) -> list[list[Any]]:
    """[text, share] of each piece of a text whose tokens have these shares."""
    made, at = [], 0
    for text, tokens in pieces(tokenizer, ids):
        made.append([text, round(float(found[at : at + tokens].mean()), 3)])
        at += tokens
    return made
