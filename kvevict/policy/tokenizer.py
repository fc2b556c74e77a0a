"""The options of a policy that depend on the model's tokenizer."""

import dataclasses
import functools
from typing import Any

import torch

from ..asking.prompts import ids_of
from ..models.families import base_model
from .inputs import Policy
from .scores import DIGITS


def _open(policy: Policy) -> tuple[Any, ...]:
    """Return the options that wait for a tokenizer: (an instruction as text, or None; whether the score pools over
    digits)."""
    text = getattr(policy.rows, "instruction", None)
    return text if isinstance(text, str) else None, getattr(policy.score, "kernel", None) == "digits"


def depends(policy: Policy) -> bool:
    """Return whether a policy does something else with a tokenizer than without one."""
    text, digits = _open(policy)
    return policy.rows.at_the_end or text is not None or digits


def of_model(model: Any) -> Any:
    """Return a pipeline's tokenizer, or the tokenizer of the folder or the hub's cache from which a model was loaded,
    without a download; None: there is no tokenizer, or it does not load."""
    if not isinstance(model, torch.nn.Module) and getattr(model, "tokenizer", None) is not None:
        return model.tokenizer
    config = base_model(model).config
    try:
        return _loaded(config.name_or_path, getattr(config, "_commit_hash", None)) if config.name_or_path else None
    except Exception:  # of whatever reads its files: the model works without it
        return None


@functools.lru_cache(maxsize=2)
def _loaded(name: str, revision: Any) -> Any:
    from transformers import AutoTokenizer

    options = dict(local_files_only=True, trust_remote_code=False)
    return AutoTokenizer.from_pretrained(name, revision=revision or "main", **options)


def told(policy: Any, tokenizer: Any) -> Policy:
    """Return the policy with its tokenizer's values: the ids of an instruction that its rows have as a text
    (rows="repeat"), and the number of tokens that hold as many digits as its score pools over (kernel="digits")."""
    text, digits = _open(policy)
    if text is not None:
        rows = dataclasses.replace(policy.rows, instruction=tuple(ids_of(tokenizer, text)))
        policy = dataclasses.replace(policy, rows=rows)
    if digits:
        policy = dataclasses.replace(policy, score=dataclasses.replace(policy.score, kernel=holding(tokenizer, DIGITS)))
    return policy


def holding(tokenizer: Any, digits: int) -> int:
    """Return the odd number of tokens nearest to the number that so many digits take."""
    number = "3141592653589793238462643383279"
    tokens = len(ids_of(tokenizer, number)) / len(number) * digits
    return 2 * round((tokens - 1) / 2) + 1
