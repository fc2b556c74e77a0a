"""Sets the options of a policy that depend on the model's tokenizer."""

import dataclasses
import functools
from typing import Any

import torch

from ..asking.prompts import ids_of
from ..models.families import base_model
from .policy import Policy
from .scores import DIGITS

NUMBER = "3141592653589793238462643383279"


def depends(policy: Policy) -> bool:
    """Return whether a tokenizer changes what a policy keeps."""
    return policy.rows.at_the_end or _pools_digits(policy)


def _pools_digits(policy: Policy) -> bool:
    return getattr(policy.score, "kernel", None) == "digits"


def of_model(model: Any) -> Any:
    """Return the tokenizer of a pipeline, or of the folder or hub cache from which the model was loaded. Nothing is
    downloaded. None: there is no tokenizer, or it does not load."""
    if not isinstance(model, torch.nn.Module) and getattr(model, "tokenizer", None) is not None:
        return model.tokenizer
    config = base_model(model).config
    try:
        return _loaded(config.name_or_path, getattr(config, "_commit_hash", None)) if config.name_or_path else None
    except Exception:  # a tokenizer's files may raise anything when read, and a model works without a tokenizer
        return None


def untokenized(model: Any) -> str:
    """Say, for a warning, that `of_model` finds no tokenizer, and where it looked."""
    folder = base_model(model).config.name_or_path
    return f"{folder} has no tokenizer that loads" if folder else "the model was not loaded from a folder"


@functools.lru_cache(maxsize=2)
def _loaded(name: str, revision: str | None) -> Any:
    from transformers import AutoTokenizer

    options = dict(local_files_only=True, trust_remote_code=False)
    return AutoTokenizer.from_pretrained(name, revision=revision or "main", **options)


def told(policy: Policy, tokenizer: Any) -> Policy:
    """Return the policy with kernel="digits" replaced by a number: the odd number of tokens nearest to the number of
    tokens that `DIGITS` digits take in this tokenizer."""
    if not _pools_digits(policy):
        return policy
    tokens = len(ids_of(tokenizer, NUMBER)) / len(NUMBER) * DIGITS
    kernel = 2 * round((tokens - 1) / 2) + 1
    score: Any = policy.score
    return dataclasses.replace(policy, score=dataclasses.replace(score, kernel=kernel))
