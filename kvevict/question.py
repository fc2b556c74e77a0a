"""Which tokens of a prompt observe it: the question, wherever it stands."""

import contextlib
import numbers
from dataclasses import dataclass
from typing import Any

import numpy as np

from .context import within


@contextlib.contextmanager
def observing(question, tokenizer=None):
    """Inside, the question observes the prompts that are read, wherever it stands in them:

    with kvevict.observing("Who is the captain?", tokenizer):
        model.generate(**inputs)

    question   a text that the prompt has, of which the last occurrence counts and white space does not; or its tokens,
               (start, stop) as in a Python slice of the prompt without its padding; or a list of these, one for each
               row of a batch
    tokenizer  the model's, for a text

    The question's tokens and the prompt's last ones are appended to every chunk, so the policy's rows must be "probe"
    (take, take+edie, ...). A read raises ValueError, before the cache changes, for a question that its prompt does not
    have, and for one that is as long as a chunk.
    """
    asked = question if isinstance(question, list) else [question]
    for each in asked:
        _check(each, tokenizer)
    with within(question=Question(tuple(asked), tokenizer)):
        yield


def _check(question, tokenizer) -> None:
    if isinstance(question, str):
        if not question.strip():
            raise ValueError("question is empty: give its words as the prompt has them")
        if not callable(tokenizer):
            raise TypeError("tokenizer is missing: a question that is a text is found with the model's tokenizer")
        return
    if not (
        isinstance(question, tuple) and len(question) == 2 and all(isinstance(end, numbers.Integral) for end in question)
    ):
        raise TypeError(f"question must be a text, (start, stop) or a list of these, got {question!r}")
    start, stop = question
    if (start < 0) != (stop <= 0) or start >= stop:
        raise ValueError(
            f"question={question!r} is not a span: give start < stop, both counted from the start (>= 0) or both from "
            "the end (start < 0, stop <= 0)"
        )


@dataclass(frozen=True)
class Question:
    asked: tuple  # a text or a span for all rows of a batch, or one for each
    tokenizer: Any = None

    def rows(self, request, prompt: int):
        """The policy's rows, for the first `prompt` columns of a `kvevict.engine.request.Request`."""
        if len(self.asked) not in (1, request.batch):
            raise ValueError(f"{len(self.asked)} questions for a batch of {request.batch} rows: give one, or one a row")
        asked = self.asked * (request.batch // len(self.asked))
        tokens = np.maximum(prompt - request.padding, 0)
        spans = [[self._span(request, b, each, n)] for b, (each, n) in enumerate(zip(asked, tokens.tolist()))]
        rows, size = request.policy.rows.of_spans(spans, tokens), request.policy.chunk_size
        if size is not None and rows.appended(0, 0, False) >= size:
            raise ValueError(
                f"the question and the prompt's last tokens are {rows.appended(0, 0, False)}, and chunks have {size}: "
                "give a larger chunk_size, or a part of the question"
            )
        return rows

    def _span(self, request, row: int, asked, tokens: int) -> tuple:
        """(start, stop) of a row of `tokens` tokens."""
        if isinstance(asked, str):
            if request.ids is None:
                raise ValueError("a question that is a text is found in token ids: pass input_ids, or give its tokens")
            first = int(request.padding[row])
            found = find(self.tokenizer, request.ids[row, first : first + tokens].tolist(), asked)
            if found is None:
                raise ValueError(f"the prompt does not have the question {asked!r}: give its words as the prompt has them")
            return found
        start, stop = asked if asked[0] >= 0 else (tokens + asked[0], tokens + asked[1])
        if start < 0 or stop > tokens:
            raise ValueError(f"question={asked} reaches outside a prompt of {tokens} tokens")
        return start, stop


def find(tokenizer, ids: list, text: str):
    """(start, stop) of the fewest ids that hold a text's last occurrence, white space aside; None: they do not."""
    wanted = "".join(text.split())

    def has(start, stop):
        return wanted in "".join(tokenizer.decode(ids[start:stop], clean_up_tokenization_spaces=False).split())

    if not has(0, len(ids)):
        return None
    start, beyond = 0, len(ids)
    while beyond - start > 1:
        middle = (start + beyond) // 2
        start, beyond = (middle, beyond) if has(middle, len(ids)) else (start, middle)
    before, stop = start, len(ids)
    while stop - before > 1:
        middle = (before + stop) // 2
        before, stop = (before, middle) if has(start, middle) else (middle, stop)
    return start, stop
