"""Finds the question of a prompt, wherever it stands, and the request around it. If the policy's rows are a probe, the
question's tokens observe, and the request is kept."""

import contextlib
import math
import numbers
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..cautions import once
from ..context import within
from ..engine.hook.arguments import Arguments
from ..engine.read.plan import Plan
from ..policy.policy import Policy
from ..policy.rows import Question, Rows
from . import prompts
from .sentences import PARAGRAPH, question_before, question_of, same
from .tokens import find, squeezed, start_after
from .turns import Turns

FEW = 8  # tokens, at most, that a template puts after a question ("Answer:"): more begin an answer
END = 256  # tokens at a prompt's end, at most a quarter of it, that may be a request with its question
SHORT = 4  # words, at most, of a last question such as "What is your answer?", which refers to one before the text
AGAIN = 8  # tokens, at least, of a question that is looked for earlier in the prompt: the text may have shorter ones
LINE = "\n"


@contextlib.contextmanager
def observing(question: str | tuple[int, int] | list[Any], tokenizer: Any = None) -> Iterator[None]:
    """Let a question's tokens observe the prompts that are read in this block, wherever the question stands:

    with kvevict.observing("Who is the captain?", tokenizer):
        model.generate(**inputs)

    question   a text in the prompt, of which the last occurrence counts and white space does not; or its tokens,
               (start, stop) as in a Python slice of the prompt without its padding; or a list of these, one for each
               row of a batch
    tokenizer  the model's tokenizer, for a question that is a text. With it the request around the question is kept
               from its paragraph's start on; and if the prompt has the question twice, the last one observes alone

    The question's tokens are appended to every chunk, so the policy's rows must be "probe" (take, take+edie, ...). A
    read raises ValueError, before the cache changes, for a question that is not in its prompt or as long as a chunk.
    """
    asked = question if isinstance(question, list) else [question]
    for each in asked:
        _check(each, tokenizer)
    with within(question=Asked(tuple(asked), tokenizer)):
        yield


def _check(question: Any, tokenizer: Any) -> None:
    if isinstance(question, str):
        if not question.strip():
            raise ValueError("question is empty: give its words as the prompt has them")
        if tokenizer is None:
            raise TypeError("tokenizer is missing: a question that is a text is found with the model's tokenizer")
        prompts.check(tokenizer)
        return
    pair = isinstance(question, tuple) and len(question) == 2
    if not (pair and all(isinstance(end, numbers.Integral) for end in question)):
        raise TypeError(f"question must be a text, (start, stop) or a list of these, got {question!r}")
    start, stop = question
    if (start < 0) != (stop <= 0) or start >= stop:
        raise ValueError(
            f"question={question!r} is not a span: give start < stop, both counted from the start (>= 0) or both from "
            "the end (start < 0, stop <= 0)"
        )


class Finder:
    """The base of the classes that find a prompt's question."""

    tokenizer: Any = None

    @cached_property
    def _turns(self) -> Turns:
        return Turns.of(self.tokenizer)

    def rows(self, arguments: Arguments, prompt: int) -> Rows:
        """Return the policy's rows for the first `prompt` columns of a call."""
        raise NotImplementedError

    def before(
        self, ids: list[int] | None, span: tuple[int, int], tokens: int, seen: int
    ) -> tuple[int, int, bool] | None:
        """Return `Question.before` of a prompt of `tokens` tokens after `seen` others: the question's span if it stands
        before the text; else the last earlier place of its words, or None. `ids` is None for embeddings."""
        start, stop = span
        if not in_last_part(span, tokens, seen):
            return start, stop, True
        if ids is None or not callable(self.tokenizer) or stop - start < AGAIN:
            return None
        asked = self.tokenizer.decode(ids[start:stop], clean_up_tokenization_spaces=False)
        earlier = find(self.tokenizer, ids[:start], asked) if asked.strip() else None
        return earlier and (*earlier, False)

    def requests(
        self, arguments: Arguments, prompts: Sequence[list[int] | None], spans: Sequence[tuple[int, int] | None],
        tokens: list[int],
    ) -> tuple[tuple[int, ...], ...]:  # fmt: skip
        """Count, for each row of a call, the request's tokens up to the prompt's end: from the question's paragraph on,
        from its line on, and from the question on; () if no question is in the prompt's last part. A row has its
        prompt's ids (None for embeddings) and its question's span (start, stop) or None."""
        found: list[tuple[int, ...]] = []
        for ids, span, n, seen in zip(prompts, spans, tokens, arguments.seen, strict=True):
            if span is None or not in_last_part(span, n, seen):
                found.append(())
                continue
            starts: list[int | None] = []
            if ids is not None and callable(self.tokenizer):
                before = ids[: span[0]]
                starts = [
                    start_after(self.tokenizer, before, (mark, self._turns.opened), END) for mark in (PARAGRAPH, LINE)
                ]
            sizes = [n - start for start in (*starts, span[0]) if start is not None]
            found.append(tuple(dict.fromkeys(sizes)))
            warn_if_long(arguments.policy, sizes[-2:][0], seen + n)
        return tuple(found)


@dataclass(frozen=True)
class Asked(Finder):
    """Finds the question that the user gives to `observing`."""

    asked: tuple  # one text or span for all rows of a batch, or one per row
    tokenizer: Any = None

    def rows(self, arguments: Arguments, prompt: int) -> Rows:
        if len(self.asked) not in (1, arguments.batch):
            raise ValueError(
                f"{len(self.asked)} questions for a batch of {arguments.batch} rows: give one, or one a row"
            )
        asked = self.asked * (arguments.batch // len(self.asked))
        tokens = np.maximum(prompt - arguments.padding, 0).tolist()
        read = arguments.ids is not None and callable(self.tokenizer)
        prompts = [ids_of_row(arguments, b, n) if read else None for b, n in enumerate(tokens)]
        spans = [self._span(*each) for each in zip(prompts, asked, tokens, strict=True)]
        longest, size = max(stop - start for start, stop in spans), arguments.policy.chunk_size
        if size is not None and longest >= size:
            raise ValueError(
                f"a question of {longest} tokens does not fit a chunk of {size}: give a larger chunk_size, or the part "
                "of it that asks"
            )
        if reads_last_rows(arguments.plan) and len({stop - start for start, stop in spans}) > 1:
            raise ValueError(
                "questions of different lengths observe from different rows of a call, and diagnose=True and TADA's "
                "budgets take its last ones: give spans of one length, or read the rows of the batch one by one"
            )
        kept = self.requests(arguments, prompts, spans, tokens)
        each = zip(prompts, spans, kept, tokens, arguments.seen, strict=True)
        return arguments.policy.rows.asked([
            Question((span,), of, self.before(ids, span, n, seen), is_near(arguments, span[0], n, seen))
            for ids, span, of, n, seen in each
        ])  # fmt: skip

    def _span(self, ids: list[int] | None, asked: tuple, tokens: int) -> tuple:
        """Return the (start, stop) of a question in a prompt of `tokens` tokens; `ids` is None for embeddings."""
        if isinstance(asked, str):
            if ids is None:
                raise ValueError("a question that is a text is found in token ids: pass input_ids, or give its tokens")
            if found := find(self.tokenizer, ids, asked):
                return found
            raise ValueError(f"the prompt does not have the question {asked!r}: give its words as the prompt has them")
        start, stop = asked if asked[0] >= 0 else (tokens + asked[0], tokens + asked[1])
        if start < 0 or stop > tokens:
            raise ValueError(f"question={asked} reaches outside a prompt of {tokens} tokens")
        return start, stop


@dataclass(frozen=True)
class LastTurn(Finder):
    """Finds the question of the last user's turn, by the tokenizer's chat template, or of the whole prompt without a
    template. A tool's result is no part of the user's turn, wherever the template writes it.

    The question is the last sentence with a question mark near the turn's end, or else the first near its start; a
    short turn without a question mark is itself the question. If a longer question stands before the text and the last
    one has few words, both observe. The policy's rows stay as they are if no question is found, or if they contain the
    question and the answer's first words follow it.
    """

    tokenizer: Any
    request: str = ""  # the question of the turn, if the caller knows it

    def rows(self, arguments: Arguments, prompt: int) -> Rows:
        policy: Policy = arguments.policy
        rows: Any = policy.rows
        if arguments.ids is None or not rows.at_the_end:
            return rows
        tokens = np.maximum(prompt - arguments.padding, 0)
        last, tokens = rows.lengths(tokens).tolist(), tokens.tolist()
        prompts = [ids_of_row(arguments, b, n) for b, n in enumerate(tokens)]
        found = [self._found(*each) for each in zip(prompts, arguments.seen, strict=True)]
        kept = self.requests(arguments, prompts, [spans[-1] if spans else None for spans, _ in found], tokens)
        rows = rows.keeping(kept) if any(kept) else rows
        place, questions = not reads_last_rows(arguments.plan), []
        each = zip(prompts, found, kept, tokens, last, arguments.seen, strict=True)
        for ids, (spans, opens), request, n, own, seen in each:
            spans = fitting(spans, policy.chunk_size or prompt)
            near = bool(spans) and is_near(arguments, spans[0][0], n, seen)
            inside = bool(spans) and spans[0][0] >= n - own
            if not spans or (inside and (not near or self._begins(ids, spans[-1]))):
                questions.append(Question(((n - own, n),), request, None, place, True))  # the policy's rows observe
            else:
                questions.append(Question(spans, request, opens, near))
        if all(question.last for question in questions):
            return rows
        chosen = rows.asked(questions)
        return rows if not place and len(set(chosen.lengths(None))) > 1 else chosen

    def _begins(self, ids: list, span: tuple) -> bool:
        """Whether the answer's first words follow the question."""
        rest, tail = squeezed(self.tokenizer.decode(ids[span[1] :])), squeezed(self._turns.tail)
        return len(ids) - span[1] > FEW and not (tail and rest.endswith(tail))

    def _found(self, ids: list, seen: int = 0) -> tuple:
        """Find the question in a prompt after `seen` tokens. Returns (the spans that ask, in order; the question before
        the text, as (start, stop, whether nothing repeats it), or None)."""
        turn, rest = self._turns.last(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        if self.request and not self._turns.opened:  # without a template nothing shows where the last turn begins
            turn, rest = self.request, ""
        elif not turn or squeezed(self.request) in squeezed(turn):
            turn = self.request or turn
        asked, opens = question_of(turn), question_before(turn)
        echo = asked and squeezed(asked) in squeezed(rest)  # a call of a tool, or its result, has the question's words
        after = find(self.tokenizer, ids, rest) if echo else None
        span = find(self.tokenizer, ids[: after[0]] if after else ids, asked) if asked else None
        if span is None:
            return (), None
        before = find(self.tokenizer, ids[: span[0]], opens) if opens else None
        if before is None:
            return (span,), self.before(ids, span, len(ids), seen)
        if same(asked, opens):
            return (span,), (*before, False)
        short = len(asked.split()) <= min(SHORT, len(opens.split()) - 1)
        return ((before, span), (*before, True)) if short else ((span,), self.before(ids, span, len(ids), seen))


def in_last_part(span: tuple, tokens: int, before: int = 0) -> bool:
    """Whether a question's span is so near to the end of a prompt of `tokens` tokens, read after `before` others, that
    the request around the question may reach the end."""
    return tokens - span[0] <= min(END, (before + tokens) // 2)


def warn_if_long(policy: Policy, needed: int, seen: int) -> None:
    """Warn, once for each budget, if a request of `needed` tokens takes more than half of the slots of a row that has
    read `seen` tokens."""
    budget = policy.slots(seen)
    if 2 * needed <= budget or seen <= budget:
        return
    share = math.ceil(200 * needed / seen) / 100
    once(
        ("request", policy.budget),
        f"the prompt's question and the text around it take {needed} tokens, more than half of the {budget} slots that "
        f"each head keeps, so that some of their words are evicted: give budget={2 * needed}"
        + (f", or budget={share}" if share < 1 else ""),
    )


def fitting(spans: tuple, most: int) -> tuple:
    """Return those of the spans (start, stop) that have fewer than `most` tokens together: all, the last, or none."""
    sizes = ((each, sum(stop - start for start, stop in each)) for each in (spans, spans[-1:]))
    return next((each for each, size in sizes if size < most), ())


def is_near(arguments: Arguments, start: int, tokens: int, seen: int) -> bool:
    """Whether a question that starts at token `start` of a prompt of `tokens` tokens, read after `seen` others, is near
    enough to the end to observe in place, not appended to the last chunk. It is not if the call's last rows are
    measured, or if it starts before the tokens that every layer reads (tsp)."""
    policy = arguments.policy
    most = min(END, policy.chunk_size or END, END if policy.tsp is None else policy.goes_on)
    return not reads_last_rows(arguments.plan) and tokens - start <= min(most, (seen + tokens) // 4)


def reads_last_rows(plan: Plan) -> bool:
    """Whether a plan takes the call's last rows for measurements (diagnose=True, TADA's budgets)."""
    return plan.run.diagnose or plan.policy.layers.measures


def ids_of_row(arguments: Arguments, row: int, tokens: int) -> list[int]:
    """Return the ids of the first `tokens` tokens of a call's row, without its padding."""
    first = int(arguments.padding[row])
    return arguments.ids[row, first : first + tokens].tolist()
