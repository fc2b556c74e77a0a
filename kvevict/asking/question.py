"""Finds the question of a prompt, wherever it stands, and the request: the question with the text around it. Under a
policy with rows="probe" the queries of the question's tokens score the slots, and the request's slots are kept."""

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

FEW = 8  # most tokens that a template puts after a question ("Answer:"); more than these begin an answer
END = 256  # tokens; a question that starts farther from the prompt's end is not near the end
SHORT = 4  # most words of a last question that may only refer to an earlier one ("What is your answer?")
AGAIN = 8  # fewest tokens of a question that is looked for earlier in the prompt: a shorter one may occur by chance
LINE = "\n"


@contextlib.contextmanager
def observing(question: str | tuple[int, int] | list[Any], tokenizer: Any = None) -> Iterator[None]:
    """Let the queries of a question's tokens score the slots of the prompts that are read in this block, wherever in
    its prompt the question stands:

    with kvevict.observing("Who is the captain?", tokenizer):
        model.generate(**inputs)

    question   a text in the prompt, of which the last occurrence counts, white space aside; or (start, stop) of the
               question's tokens, as in a Python slice of the prompt without its padding; or a list of these, one for
               each row of a batch
    tokenizer  the model's tokenizer, needed for a question that is a text. With a tokenizer, the request around the
               question is kept from the start of the question's paragraph on; and if the prompt has the question twice,
               the last occurrence alone scores the slots

    The question's tokens are appended to every chunk, so the policy's rows must be "probe" (take, take+edie, ...). A
    read raises ValueError, before the cache changes, for a question that is not in its prompt or that is as long as a
    chunk.
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
    """The base class of objects that find a prompt's question."""

    tokenizer: Any = None

    @cached_property
    def _turns(self) -> Turns:
        return Turns.of(self.tokenizer)

    def rows(self, arguments: Arguments, prompt: int) -> Rows:
        """Return the policy's `Rows`, which select the queries that score slots, for a prompt: a call's first `prompt`
        columns."""
        raise NotImplementedError

    def before(
        self, ids: list[int] | None, span: tuple[int, int], tokens: int, seen: int
    ) -> tuple[int, int, bool] | None:
        """Return `Question.before`, (start, stop, whether nothing repeats the question), for a prompt of `tokens`
        tokens that is read after `seen` earlier tokens. This is the question's `span` if the question stands before the
        text, else the last earlier place of its words; None if there is neither. `ids` is None for embeddings."""
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
        """Count, for each row of a call, the request's tokens from each place where the request may begin to the
        prompt's end: from the question's paragraph, from its line and from the question itself. The tuple is () if no
        question is in the prompt's last part. Each row has its prompt's ids (None for embeddings), its question's span
        (start, stop) or None, and its number of tokens."""
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
    """Finds the question that was given to `observing`."""

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
        """Return (start, stop) of a question, in tokens of a prompt that has `tokens` of them. `ids` is None for
        embeddings."""
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
    """Finds the question of the last user's turn, which the tokenizer's chat template delimits; without a template,
    that of the whole prompt. A tool's result is not part of the user's turn, wherever the template writes it.

    The question is the last sentence with a question mark near the turn's end, or else the first one near the turn's
    start; a short turn without a question mark is itself the question. If the last question has few words and a longer
    one stands before the text, the queries of both score the slots. The policy's own rows stay if no question is found,
    or if they contain the question and the answer's first words follow it.
    """

    tokenizer: Any
    request: str = ""  # the question of the turn, if it is known

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
                questions.append(Question(((n - own, n),), request, None, place, True))  # the policy's own rows observe
            else:
                questions.append(Question(spans, request, opens, near))
        if all(question.last for question in questions):
            return rows
        chosen = rows.asked(questions)
        return rows if not place and len(set(chosen.lengths(None))) > 1 else chosen

    def _begins(self, ids: list, span: tuple) -> bool:
        """Return whether the prompt already has the answer's first words, after the question."""
        rest, tail = squeezed(self.tokenizer.decode(ids[span[1] :])), squeezed(self._turns.tail)
        return len(ids) - span[1] > FEW and not (tail and rest.endswith(tail))

    def _found(self, ids: list, seen: int = 0) -> tuple:
        """Find the question in a prompt that is read after `seen` tokens. Returns a pair: the spans whose queries are
        to score the slots, in order; and (start, stop, whether nothing repeats it) of a question before the text, or
        None."""
        turn, rest = self._turns.last(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        if self.request and not self._turns.opened:  # without a template nothing shows where the last turn begins
            turn, rest = self.request, ""
        elif not turn or squeezed(self.request) in squeezed(turn):
            turn = self.request or turn
        asked, opens = question_of(turn), question_before(turn)
        echo = asked and squeezed(asked) in squeezed(rest)  # a tool's call or result repeats the question
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
    """Return whether a question's span starts so near to the end of a prompt of `tokens` tokens, which is read after
    `before` earlier tokens, that the request around the question may reach the prompt's end."""
    return tokens - span[0] <= min(END, (before + tokens) // 2)


def warn_if_long(policy: Policy, needed: int, seen: int) -> None:
    """Warn, once per budget, if a request of `needed` tokens takes more than half of the slots that each head keeps of
    a row of `seen` tokens."""
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
    """Return all spans (start, stop) if they have fewer than `most` tokens together, else the last span if it has, else
    ()."""
    sizes = ((each, sum(stop - start for start, stop in each)) for each in (spans, spans[-1:]))
    return next((each for each, size in sizes if size < most), ())


def is_near(arguments: Arguments, start: int, tokens: int, seen: int) -> bool:
    """Return whether a question that starts at token `start` is near enough to the prompt's end to observe where it
    stands, instead of from a copy appended to the last chunk. The prompt has `tokens` tokens and is read after `seen`
    earlier ones. The answer is no if the call's last rows are measured, or if the question starts before the tokens
    that every layer reads (`tsp`)."""
    policy = arguments.policy
    most = min(END, policy.chunk_size or END, END if policy.tsp is None else policy.goes_on)
    return not reads_last_rows(arguments.plan) and tokens - start <= min(most, (seen + tokens) // 4)


def reads_last_rows(plan: Plan) -> bool:
    """Return whether a plan measures the last rows of a call, as diagnose=True and TADA's layer budgets do."""
    return plan.run.diagnose or plan.policy.layers.measures


def ids_of_row(arguments: Arguments, row: int, tokens: int) -> list[int]:
    """Return the ids of the first `tokens` tokens of row `row` of a call, without the row's padding."""
    first = int(arguments.padding[row])
    return arguments.ids[row, first : first + tokens].tolist()
