"""All code that depends on the version of Transformers, and the stand-ins for methods of its models. Transformers is
imported in functions only, as its import is slow."""

import functools
import inspect
import sys
import warnings
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch

from ..context import context

TESTED = (5, 4), (5, 24)  # the oldest and the newest version of Transformers that the tests have run with
OLDEST, NEWEST = (".".join(map(str, version)) for version in TESTED)


def checked(found: str) -> tuple:
    """Return (major, minor) of a version of Transformers. Raises ImportError if the version is too old, and warns if it
    is newer than the tested ones."""
    version = tuple(int(part) for part in found.split(".")[:2])
    if version < TESTED[0]:
        raise ImportError(
            f"kvevict needs transformers {OLDEST} or newer, found {found}; run: pip install -U 'transformers>={OLDEST}'"
        )
    if version > TESTED[1]:
        warnings.warn(
            f"kvevict is tested with transformers {OLDEST} to {NEWEST}, found {found}: it may fail, or answer wrong",
            stacklevel=2,
        )
    return version


def _installed() -> str:
    """Return the installed version of Transformers without importing it; if it is not installed, the newest tested
    version."""
    try:
        return metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return NEWEST


VERSION = checked(_installed())

# True: `crop(n)` of a cache layer keeps the first n slots if n is positive (up to version 5.16). Later versions only
# accept a negative n, which removes -n slots.
CROP_TAKES_LENGTH = VERSION < (5, 17)
# The cache's name in a model's arguments and outputs. From 5.24 on the earlier name still works, with a warning.
CACHE = "past_key_values" if VERSION < (5, 24) else "cache"
# Attribute of a patched text decoder: its `kvevict.engine.hook.installed.Installed`, which is no module or buffer
STATE = "_kvevict"


def cache_of(output: Any) -> Any:
    """Return the cache in a model's output, under this version's name."""
    return getattr(output, CACHE)


def named(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a model's call, with the cache under this version's name."""
    return {CACHE if name == "past_key_values" else name: value for name, value in kwargs.items()}


def _get_candidate_generator(model: torch.nn.Module, run: Callable, *args: object, **kwargs: Any) -> object:
    """Stand in for `run`, the method by which `generate` begins assisted or prompt-lookup decoding: mark its cache, as
    candidate tokens may be taken back from it. (Transformers' own mark, `activate_past_recording`, comes before the
    cache is an `EvictionCache`.)"""
    if getattr(kwargs.get("generation_config"), "assistant_early_exit", None) is not None:
        raise ValueError(
            "assistant_early_exit drafts with some of the model's layers, whose cache kvevict cannot share: give an "
            "assistant_model, or prompt_lookup_num_tokens"
        )
    if context().ahead is not None:
        raise ValueError(
            "recall_check drafts with the model itself: generate without assistant_model and prompt_lookup_num_tokens, "
            "or leave recall_check out"
        )
    assistant = kwargs.get("assistant_model")
    installed = (module.__dict__.get(STATE) for module in (assistant.modules() if assistant is not None else ()))
    if any(each is not None and each.chosen() is not None for each in installed):
        raise ValueError(
            "assistant_model is patched, and an assistant takes back tokens of its prompt, which may be evicted: call "
            "kvevict.unpatch(assistant_model)"
        )
    cache = kwargs.get("model_kwargs", {}).get(CACHE)
    if cache is not None:
        if cache.get_seq_length():
            raise ValueError(
                f"assisted and prompt-lookup decoding read the whole prompt anew, after the {cache.get_seq_length()} "
                "tokens that the cache holds: generate without the cache, or without an assistant"
            )
        cache.record_past = True
    return run(*args, **kwargs)


def _get_logits_processor(model: torch.nn.Module, run: Callable, *args: object, **kwargs: object) -> list:
    """Stand in for `run`, the method by which `generate` prepares its logits processors: let checked answers draft with
    them."""
    processors, ahead = run(*args, **kwargs), context().ahead
    return processors if ahead is None else ahead.drafts.noted(processors, kwargs["generation_config"])


def _init_continuous_batching(model: torch.nn.Module, run: Callable, *args: object, **kwargs: object) -> None:
    raise ValueError(
        "a paged cache (generate_batch, continuous batching) cannot be evicted from: call model.generate, or "
        "kvevict.unpatch(model) first"
    )


# {method name: stand-in for this method of a patched model, called as function(model, original method, *args,
# **kwargs)}. A model without a method of this name is left as it is.
STAND_INS = {
    "_get_candidate_generator": _get_candidate_generator,
    "_get_logits_processor": _get_logits_processor,
    "init_continuous_batching": _init_continuous_batching,
}


def base_attention(module: torch.nn.Module, config: Any) -> Callable:
    """Return the attention function that `module` calls when it is not patched. config: the module's original
    config."""
    from transformers import AttentionInterface

    eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return AttentionInterface().get_interface(config._attn_implementation, eager)


@functools.cache
def takes(function: Callable, name: str) -> bool:
    """Whether a function has a parameter called `name`."""
    return name in inspect.signature(function).parameters


def apply_rotary(module: torch.nn.Module, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [B, H, p, D] by cos and sin [B, p, r], with the rotation function in the file of the module's class.
    The last D - r dimensions are not rotated, by the rotation function itself or, if it takes r dimensions only, by
    leaving them out here."""
    function = sys.modules[type(module).__module__].apply_rotary_pos_emb
    both = takes(function, "k")
    rotated = lambda part: function(part, part, cos, sin)[0] if both else function(part, cos, sin)  # noqa: E731
    width = cos.shape[-1]
    try:
        return rotated(x)
    except RuntimeError:  # the function takes r dimensions only, as Phi's and StableLM's do
        return torch.cat([rotated(x[..., :width]), x[..., width:]], -1)


def keeps_state(kind: type) -> None:
    """Register a class of cache layers with Transformers as one that keeps a convolution's or a recurrent state."""
    from transformers import cache_utils

    mixin = getattr(cache_utils, "LinearAttentionCacheLayerMixin", None)
    if mixin is not None:
        mixin.register(kind)
