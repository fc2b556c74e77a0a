"""Checks of the arguments of a decoder's call. Errors come before the cache changes."""

import torch
from transformers.cache_utils import DynamicCache

from ..slots.adopt import EvictionCache, adopt
from ..slots.cache import HALF_READ, EvictionLayer
from .packing import padding_of


def check_tokens(tokens, cache) -> None:
    """Raise ValueError for a call without tokens."""
    if tokens == 0:
        held = cache.get_seq_length() if cache is not None else 0
        raise ValueError(
            "the input is empty: give at least one token"
            + (f" after the {held} that the cache holds, and an attention_mask that covers both" if held else "")
        )


def columns_of(cache, batch) -> int:
    """Number of columns that a cache has seen. Raises ValueError if `batch` rows cannot continue from it."""
    if not isinstance(cache, DynamicCache) or getattr(cache, "offloading", False):
        raise ValueError(
            f"past_key_values is {'an offloaded' if getattr(cache, 'offloading', False) else 'a'} "
            f"{type(cache).__name__} that kvevict cannot evict from; it works with a "
            "plain DynamicCache: drop cache_implementation and offloading"
        )
    columns = cache.get_seq_length()
    ours = [layer for layer in cache.layers if isinstance(layer, EvictionLayer) and layer.is_initialized]
    if getattr(cache, "half_read", False) or any(layer.columns != columns for layer in ours):
        raise ValueError(HALF_READ)
    for layer in ours:
        if layer.len.shape[0] != batch:
            raise ValueError(f"past_key_values holds a batch of {layer.len.shape[0]} rows, the input has {batch}")
    return columns


def plain_mask(mask, called, tokens):
    """The 2D padding mask. If the outer model has expanded it to one mask per kind of layer, the mask it started from.
    Raises ValueError if an expanded mask lets a token see a later one (Gemma 3's pictures)."""
    given = called.mask
    made = isinstance(mask, dict) or (isinstance(mask, torch.Tensor) and mask.ndim == 4)
    plain = given is None or (isinstance(given, torch.Tensor) and given.ndim == 2)
    if not (made and plain and called.model is not None):
        return mask
    for kind, each in (mask if isinstance(mask, dict) else {"full_attention": mask}).items():
        if not (isinstance(each, torch.Tensor) and each.ndim == 4 and each.shape[2] == tokens):
            continue
        sees = each if each.dtype == torch.bool else each >= 0
        if bool(sees[..., -tokens:].triu(1).any()):
            raise ValueError(
                "attention_mask lets tokens see later ones, as in pictures whose tokens see each other; read in "
                "chunks they would not: leave pictures away, or call kvevict.unpatch(model)"
            )
        if given is None and kind == "full_attention" and not bool(sees[..., -1, :].all()):
            raise ValueError("a padded batch needs attention_mask= by name, as a 2D tensor")
    return given


def check_mask(mask, batch, columns, tokens) -> None:
    """Raise ValueError unless a mask covers the columns seen and the new tokens."""
    if mask is None:
        return
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
        raise ValueError(
            "attention_mask must be a 2D tensor [batch, tokens] of zeros and ones; prepared 4D masks and mask "
            "dictionaries cannot be combined with eviction"
        )
    wanted = (batch, columns + tokens)
    if tuple(mask.shape) != wanted:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}, expected {wanted}: it must cover the {columns} "
            f"tokens seen and the {tokens} new ones"
        )


def make_ours(cache, patch, config, mask, columns) -> None:
    """Adopt a cache that is not ours yet. Raises ValueError if eviction from it is impossible."""
    layers, first = cache.layers, None
    ours = len(layers) == len(patch.kinds) and all(isinstance(layers[index], EvictionLayer) for index in patch.order)
    if ours and isinstance(cache, EvictionCache):
        return
    if mask is not None and not ours:
        first, _, holes = padding_of(mask[:, :columns])
        if holes:
            raise ValueError(
                "attention_mask must be left-padded (zeros first) for tokens that were read before patching: set "
                "tokenizer.padding_side='left', or read them with the patched model"
            )
    adopt(cache, patch.kinds, config, patch.ranks, first)


def check_roll_back(request) -> None:
    """Raise ValueError if the caller may roll tokens back and the model or the policy cannot."""
    policy = request.policy
    if request.rolls_back and request.patch.keeps_state:
        raise ValueError(
            "assisted and prompt-lookup decoding roll tokens back, which this model's layers with a state cannot: "
            "generate without an assistant"
        )
    if request.rolls_back and request.wanted > 1 and (policy.decode or policy.carry == "sum"):
        raise ValueError(
            "assisted and prompt-lookup decoding roll tokens back, which eviction while decoding and h2o's sums "
            "cannot: pass decode=False and another policy than h2o or vatp, or generate without an assistant"
        )
