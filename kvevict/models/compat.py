"""All branches on the version of Transformers, and the stand-ins for methods of its models. Transformers, whose import
is slow, is imported in functions only."""

import functools
import inspect
import sys
import warnings
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch

TESTED = (5, 4), (5, 24)  # the oldest and the newest version that the tests have run with
OLDEST, NEWEST = (".".join(map(str, version)) for version in TESTED)


def checked(found: str) -> tuple:
    """Return (major, minor) of a version of Transformers. Raises ImportError for one that is too old, and warns of one
    that is newer than the tested ones."""
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
    """Return the version of Transformers, without its import; the newest tested one if it is not installed."""
    try:
        return metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return NEWEST


VERSION = checked(_installed())

# crop(n) of a cache layer keeps n slots for a positive n up to 5.16; later versions only remove -n slots.
CROP_TAKES_LENGTH = VERSION < (5, 17)
# The cache's name in a model's calls and outputs; versions from 5.24 on take the earlier name too, with a warning.
CACHE = "past_key_values" if VERSION < (5, 24) else "cache"
# Attribute of the text decoder for its `kvevict.engine.hook.installed.Installed`, outside nn.Module's registries.
STATE = "_kvevict"


def cache_of(output: Any) -> Any:
    """Return the cache of a model's output."""
    return getattr(output, CACHE)


def named(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a call's arguments, with the cache by this version's name."""
    return {CACHE if name == "past_key_values" else name: value for name, value in kwargs.items()}


def _get_candidate_generator(model: torch.nn.Module, run: Callable, *args: Any, **kwargs: Any) -> Any:
    """Mark the cache of assisted and prompt-lookup decoding, whose calls have candidates that may be taken back:
    Transformers calls `activate_past_recording` before the cache is an `EvictionCache`."""
    if getattr(kwargs.get("generation_config"), "assistant_early_exit", None) is not None:
        raise ValueError(
            "assistant_early_exit drafts with some of the model's layers, whose cache kvevict cannot share: give an "
            "assistant_model, or prompt_lookup_num_tokens"
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


def _init_continuous_batching(model: torch.nn.Module, run: Callable, *args: object, **kwargs: object) -> None:
    raise ValueError(
        "a paged cache (generate_batch, continuous batching) cannot be evicted from: call model.generate, or "
        "kvevict.unpatch(model) first"
    )


# Stand-ins for methods of a patched model: function(model, the method, *args, **kwargs). A model without such a method
# is left as it is: its kind of decoding then has another entrance, or none.
STAND_INS = {
    "_get_candidate_generator": _get_candidate_generator,
    "init_continuous_batching": _init_continuous_batching,
}


def base_attention(module: torch.nn.Module, config: Any) -> Callable:
    """Return the attention function that an unpatched `module` calls under its original config."""
    from transformers import AttentionInterface

    eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return AttentionInterface().get_interface(config._attn_implementation, eager)


@functools.cache
def takes(function: Callable, name: str) -> bool:
    """Whether a function has a parameter of this name."""
    return name in inspect.signature(function).parameters


def apply_rotary(module: torch.nn.Module, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [B, H, p, D] by cos and sin [B, p, r], with the function of the module's own file. If r < D, that
    function or its caller leaves the last D - r dimensions alone."""
    function = sys.modules[type(module).__module__].apply_rotary_pos_emb
    both = takes(function, "k")
    rotated = lambda part: function(part, part, cos, sin)[0] if both else function(part, cos, sin)  # noqa: E731
    width = cos.shape[-1]
    try:
        return rotated(x)
    except RuntimeError:  # the caller passes r dimensions only (Phi, StableLM)
        return torch.cat([rotated(x[..., :width]), x[..., width:]], -1)


def keeps_state(kind: type) -> None:
    """Let Transformers look for a convolution's or a recurrent state in cache layers of this class."""
    from transformers import cache_utils

    mixin = getattr(cache_utils, "LinearAttentionCacheLayerMixin", None)
    if mixin is not None:
        mixin.register(kind)
