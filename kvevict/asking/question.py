"""Finds the question of a prompt, wherever it stands, and the request: the question with the text around it. Under a
policy with rows="probe" the queries of the question's tokens score the slots, and the request's slots are kept."""

import contextlib
import numbers
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..context import within
from ..engine.hook.arguments import Arguments
from ..policy.policy import Policy
from ..policy.rows import Found, Question, Rows
from . import prompts
from .place import END, fitting, ids_of_row, in_last_part, is_near, reads_last_rows, unfound, warn_if_long
from .request import of_whole
from .sentences import PARAGRAPH, question_before, question_of, same
from .tokens import find, squeezed, start_after
from .turns import Turns

FEW = 8  # most tokens that a template puts after a question ("Answer:"); more than these begin an answer
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
    """The base class of objects that find a prompt's question. whole: the argument of `in_last_part`; True where the
    question is named, since a long question that is looked for is likelier a part of the text."""

    tokenizer: Any = None
    whole = False

    @cached_property
    def _turns(self) -> Turns:
        return Turns.of(self.tokenizer)

    def rows(self, arguments: Arguments, prompt: int) -> tuple[Rows, tuple[Found, ...]]:
        """Return (the policy's `Rows`, which select the queries that score slots, for a prompt: a call's first `prompt`
        columns; the question of each batch row, or () under a policy that looks for none)."""
        raise NotImplementedError

    def before(
        self, ids: list[int] | None, span: tuple[int, int], tokens: int, seen: int
    ) -> tuple[int, int, bool] | None:
        """Return `Question.before`, (start, stop, whether nothing repeats the question), for a prompt of `tokens`
        tokens that is read after `seen` earlier tokens. This is the question's `span` if the question stands before the
        text, else the last earlier place of its words; None if there is neither. `ids` is None for embeddings."""
        start, stop = span
        if not in_last_part(span, tokens, seen, self.whole):
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
            if span is None or not in_last_part(span, n, seen, self.whole):
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
    whole = True

    def rows(self, arguments: Arguments, prompt: int) -> tuple[Rows, tuple[Found, ...]]:
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
        rows = arguments.policy.rows.asked([
            Question((span,), of, self.before(ids, span, n, seen), is_near(arguments, span[0], n, seen))
            for ids, span, of, n, seen in each
        ])  # fmt: skip
        return rows, tuple(
            Found(self._text(each, ids, span), span[1] - span[0], "named")
            for each, ids, span in zip(asked, prompts, spans, strict=True)
        )

    def _text(self, asked: str | tuple[int, int], ids: list[int] | None, span: tuple[int, int]) -> str | None:
        if isinstance(asked, str):
            return asked
        return None if ids is None else self.tokenizer.decode(ids[slice(*span)]).strip()

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

    def rows(self, arguments: Arguments, prompt: int) -> tuple[Rows, tuple[Found, ...]]:
        policy: Policy = arguments.policy
        rows: Any = policy.rows
        tokens = np.maximum(prompt - arguments.padding, 0)
        for b, n in enumerate(tokens.tolist() if arguments.ids is not None else ()):
            at = arguments.seen[b]
            of_whole(policy, n + at, lambda b=b, n=n, at=at: self._turn(ids_of_row(arguments, b, n), at)[0])
        if arguments.ids is None or not rows.at_the_end:
            return rows, unfound(rows, tokens.tolist(), "the prompt is given as embeddings, without its tokens' ids")
        last, tokens = rows.lengths(tokens).tolist(), tokens.tolist()
        prompts = [ids_of_row(arguments, b, n) for b, n in enumerate(tokens)]
        found = [self.found(*each) for each in zip(prompts, arguments.seen, strict=True)]
        kept = self.requests(arguments, prompts, [spans[-1] if spans else None for spans, _ in found], tokens)
        others = unfound(rows, tokens, "no question that fits a chunk was found in a prompt", self.tokenizer, prompts)
        found = [(fitting(spans, policy.chunk_size or prompt), opens) for spans, opens in found]
        told = tuple(
            self._told(ids, spans) if spans else other
            for ids, (spans, _), other in zip(prompts, found, others, strict=True)
        )
        rows = rows.keeping(kept) if any(kept) else rows
        place, questions = not reads_last_rows(arguments.plan), []
        each = zip(prompts, found, kept, tokens, last, arguments.seen, strict=True)
        for ids, (spans, opens), request, n, own, seen in each:
            near = bool(spans) and is_near(arguments, spans[0][0], n, seen)
            inside = bool(spans) and spans[0][0] >= n - own
            if not spans or (inside and (not near or self.begins(ids, spans[-1]))):
                questions.append(Question(((n - own, n),), request, None, place, True))  # the policy's own rows observe
            else:
                questions.append(Question(spans, request, opens, near))
        if all(question.last for question in questions):
            return rows, told
        chosen = rows.asked(questions)
        return rows if not place and len(set(chosen.lengths(None))) > 1 else chosen, told

    def _told(self, ids: list[int], spans: tuple[tuple[int, int], ...]) -> Found:
        text = " ".join(self.tokenizer.decode(ids[slice(*span)]).strip() for span in spans)
        how = "template" if self._turns.opened else "named" if self.request else "prompt"
        return Found(text, sum(stop - start for start, stop in spans), how)

    def begins(self, ids: list, span: tuple) -> bool:
        """Return whether the prompt already has the answer's first words, after the question."""
        rest, tail = squeezed(self.tokenizer.decode(ids[span[1] :])), squeezed(self._turns.tail)
        return len(ids) - span[1] > FEW and not (tail and rest.endswith(tail))

    def _turn(self, ids: list, seen: int) -> tuple[str, str]:
        """Return (the last user's turn of a prompt that is read after `seen` tokens, the text after it). The turn may
        have begun in the tokens before."""
        text = self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        turn, rest = self._turns.last(text)
        if not turn and seen and not self.request:
            turn, rest = self._turns.inside(text, getattr(self.tokenizer, "all_special_tokens", ()))
        if self.request and not self._turns.opened:  # without a template nothing shows where the last turn begins
            return self.request, ""
        return (self.request or turn if not turn or squeezed(self.request) in squeezed(turn) else turn), rest

    def found(self, ids: list, seen: int = 0) -> tuple:
        """Find the question in a prompt that is read after `seen` tokens. Returns a pair: the spans whose queries are
        to score the slots, in order; and (start, stop, whether nothing repeats it) of a question before the text, or
        None."""
        turn, rest = self._turn(ids, seen)
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


@dataclass(frozen=True)
class Unasked(Finder):
    """Looks for no question, since there is no tokenizer; `why` is the reason for a warning, "" if none is due."""

    why: str = ""

    def rows(self, arguments: Arguments, prompt: int) -> tuple[Rows, tuple[Found, ...]]:
        rows = arguments.policy.rows
        assert isinstance(rows, Rows)
        return rows, unfound(rows, np.maximum(prompt - arguments.padding, 0).tolist(), self.why)
