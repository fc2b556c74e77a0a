"""What of a policy depends on the model's tokenizer."""

import dataclasses

from ..prompts import ids_of
from .scores import DIGITS


def told(policy, tokenizer):
    """The policy, with what depends on a tokenizer: the ids of an instruction that its rows have as a text
    (rows="repeat"), and how many tokens hold as many digits as its score pools over (kernel="digits")."""
    text, kernel = getattr(policy.rows, "instruction", ()), getattr(policy.score, "kernel", None)
    if isinstance(text, str):
        rows = dataclasses.replace(policy.rows, instruction=tuple(ids_of(tokenizer, text)))
        policy = dataclasses.replace(policy, rows=rows)
    if kernel == "digits":
        policy = dataclasses.replace(policy, score=dataclasses.replace(policy.score, kernel=holding(tokenizer, DIGITS)))
    return policy


def holding(tokenizer, digits: int) -> int:
    """The odd number of tokens that is nearest to what so many digits of a number take."""
    number = "3141592653589793238462643383279"
    tokens = len(ids_of(tokenizer, number)) / len(number) * digits
    return 2 * round((tokens - 1) / 2) + 1
