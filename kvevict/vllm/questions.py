"""Copies of a request's question in its prompt, whose queries score the slots (METHODS section 14).

Each whole period of a prompt but the last ends with a copy of the question. The copy's rows observe and are dropped at
the period's end. vLLM's frontend knows the prompt that the client sent: lengths, usage and stop strings count no copy.
scheduler.py writes the copies when the engine gets a request, and copies.py tells the attention backend of them.
"""

import functools
import math
from typing import NamedTuple

from ..asking.prompts import Tokenizer, ids_of
from ..asking.question import LastTurn
from ..asking.tokens import find
from .options import VllmOptions, tokenizer_of

# The question's text in `SamplingParams.extra_args`, and in the field `vllm_xargs` of a request to the server.
QUESTION = "kvevict_question"
# (tokens of a copy, number of copies) in the `extra_args` that the engine sends to its workers.
COPIES = "kvevict_copies"


class Copies(NamedTuple):
    """The copies of a question in a prompt: they end the first `number` periods, each with `size` tokens."""

    size: int = 0
    number: int = 0

    def ending(self, tokens: int, period: int) -> int:
        """The number of rows of a copy among the last ones of a period that ends after `tokens` tokens."""
        return self.size if tokens <= self.number * period else 0

    def before(self, tokens: int, period: int) -> int:
        """The number of copies' tokens in the periods before the one of token number `tokens`, counted from 0."""
        return self.size * min(tokens // period, self.number)


NONE = Copies()


def check(given: dict | None) -> None:
    """Raise ValueError for the further arguments of a client's request if its question is not a text, or if they
    have what only the engine may set."""
    question = (given or {}).get(QUESTION, "a text")
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"{QUESTION} must be a text, the question's words, got {question!r}")
    if COPIES in (given or {}):
        raise ValueError(f"{COPIES} is for the engine alone: leave it out")


def with_copies(ids: list[int], question: list[int], period: int, most: float = math.inf) -> tuple[list[int], Copies]:
    """Return a prompt with at most `most` copies of a question, and these copies."""
    step = period - len(question)
    needed = -(-(len(ids) - period) // step) if step > 0 and question else 0
    count = int(max(0, min(most, needed)))
    if not count:
        return ids, NONE
    parts = [ids[i * step : (i + 1) * step] + question for i in range(count)]
    return [*(token for part in parts for token in part), *ids[count * step :]], Copies(len(question), count)


class Asking:
    """Finds the questions of one model's requests."""

    def __init__(self, options: VllmOptions, tokenizer: Tokenizer | None) -> None:
        self.options, self.tokenizer = options, tokenizer
        self._finder = None if tokenizer is None else LastTurn(tokenizer)

    @classmethod
    @functools.cache
    def of(cls, options: VllmOptions, name: str, revision: str | None, trusted: bool) -> "Asking":
        """The object for a model with these options. name, revision, trusted: the tokenizer's, and whether its code is
        trusted."""
        return cls(options, tokenizer_of(name, revision, trusted))

    def question(self, ids: list[int], named: str | None) -> list[int]:
        """Return the tokens of the question of a prompt, at most the policy's `window` observing rows; [] if no rows
        of it are to observe. named: the question's text; None: the chat template's last turn has it, as for
        `kvevict.patch`, if the policy's rows are "probe", else there is none."""
        own = self.options.window
        if not own or (named is None and not self.options.policy.rows.at_the_end):
            return []
        if named is not None and self.tokenizer is not None:
            span = find(self.tokenizer, ids, named)
            asked = ids[slice(*span)] if span else ids_of(self.tokenizer, named)
            return asked[-own:]
        spans = self._finder.found(ids)[0] if self._finder is not None else ()
        if not spans or (spans[0][0] >= len(ids) - own and self._finder.begins(ids, spans[-1])):
            spans = ((max(len(ids) - own, 0), len(ids)),)
        return [token for start, stop in spans for token in ids[start:stop]][-own:]
