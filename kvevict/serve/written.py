"""Turns the tokens of an answer, one by one, into text, reasoning and tool calls, and decides where the answer ends."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from transformers.cli.serving.utils import ToolCall
from transformers.convert_slow_tokenizer import bytes_to_unicode

from .template import Form, Parser, Part, Token

TIMES, LEAST, LONGEST = 4, 64, 256  # what counts as a repetition: least copies, least tokens, most tokens of a copy
HALF = "\ufffd"  # what a tokenizer decodes a part of a character to
BYTES = {letter: byte for byte, letter in bytes_to_unicode().items()}  # character in a byte-level vocabulary -> byte
BYTES |= {f"<0x{byte:02X}>": byte for byte in range(256)}  # sentencepiece's tokens for single bytes
Numbered: TypeAlias = tuple[int, list[Part] | None]  # (an answer's number, its new parts; None: the answer has ended)


class RepeatDetector:
    """Detects that an answer repeats itself, which an answer decoded greedily may do without end."""

    def __init__(self) -> None:
        periods = np.arange(1, LONGEST + 1)
        self._last = np.full(LONGEST, -1)  # the last `LONGEST` tokens, newest first
        # [LONGEST] for each period of 1, 2, ... tokens: how many of the newest tokens, without a gap, equal the token
        # that stands one period before.
        self._equal = np.zeros(LONGEST, int)
        self._enough = np.maximum(TIMES * periods, LEAST) - periods  # the number at which it is a repetition

    def put(self, token: int) -> bool:
        """Append a token, and return whether the tokens now end with at least `TIMES` copies of one piece, which
        together have at least `LEAST` tokens."""
        self._equal = (self._equal + 1) * (self._last == token)
        self._last = np.concatenate(([token], self._last[:-1]))
        return bool((self._equal >= self._enough).any())


class Written:
    """An answer that grows token by token with `put` until it is `over`; then `close` returns the rest. Both methods
    return the parts that later tokens cannot change any more: texts, `ReasoningText`s, `ToolCall`s, and a `Token` for
    each token with a probability.

    stops   strings that end the answer; the answer does not contain them
    ends    ids of tokens that end the answer
    most    largest number of tokens
    single  whether the answer ends after its first tool call; every answer ends before it repeats a tool call
    loops   whether the answer may repeat itself until it has `most` tokens
    before  ids before the answer that are decoded with it, because a decoder may strip a space at a text's start
    """

    def __init__(
        self, form: Form, parser: Parser | None, stops: tuple[str, ...], ends: set[int], most: int,
        single: bool = False, loops: bool = True, before: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.tokenizer, self.parser, self.silent = form.tokenizer, parser, form.silent(parser)
        self._repetition = None if loops else RepeatDetector()
        self.stops, self.ends, self.most, self.single = stops, ends, most, single
        self.tokens, self.ended = 0, False
        self.reasoning = 0  # number of tokens that belong to reasoning
        self.calls: list[ToolCall] = []
        self._ids = [*before]  # newest ids, decoded together; the text of the first `_known` ids was returned before
        self._known, self._held = len(before), ""  # `_held`: decoded text that may be the start of a stop string
        self._end: int | None = None  # the token in `ends` that ended the answer
        self._called = False  # whether a tool call ended the answer
        self._likely: list[Token] = []  # tokens with probabilities that `put` has not returned yet
        # Numbers of characters: decoded, and certain to belong to the answer, so that no stop string can cut them.
        self._decided, self._certain = 0, 0

    @property
    def over(self) -> bool:
        """Whether the answer takes no more tokens."""
        return self.ended or self.tokens >= self.most

    @property
    def finish(self) -> str:
        """OpenAI's `finish_reason`: why the answer ended."""
        if self.over and not self.ended:
            return "length"
        return "tool_calls" if self.calls else "stop"

    def put(self, token: int, probabilities: tuple[float, dict[int, float]] | None = None) -> list[Part]:
        """Append a token, and return the parts that are certain by now. probabilities: (the token's log-probability,
        {token: log-probability} of the likeliest tokens)."""
        self.tokens += 1
        reasons = self.parser is not None and self.parser.reasons and token not in self.ends
        parts: list[Part] = []
        if self._repetition is not None and self._repetition.put(token):
            self.most = self.tokens
        if token in self.ends:
            self.ended, self._end = True, token
        elif token not in self.silent:
            if probabilities is not None:
                self._likely.append(self._token(token, *probabilities))
            self._ids.append(token)
            text = self._new()
            if text and not text.endswith(HALF):
                self._ids, self._known = self._ids[self._known :], len(self._ids) - self._known
                self._decided += len(text)
                parts = self._parsed(self._until_stop(text)) + self._tokens()
        self.reasoning += reasons and self.parser.reasons
        return parts

    def _token(self, token: int, log: float, likeliest: dict[int, float]) -> Token:
        others = [(self._bytes(each), number) for each, number in likeliest.items()]
        return Token(self._bytes(token), log, others, self._decided + len(self._new().rstrip(HALF)))

    def _bytes(self, token: int) -> bytes:
        """Return the bytes that a token would add to the decoded text, also if they are only a part of a character."""
        letters = self._decoded([*self._ids, token])[len(self._decoded(self._ids)) :]
        if HALF not in letters + self._decoded([token]):
            return letters.encode()
        piece = self.tokenizer.convert_ids_to_tokens(token)
        pieces = [piece] if piece in BYTES else piece
        return bytes(BYTES[each] for each in pieces) if all(map(BYTES.__contains__, pieces)) else letters.encode()

    def _tokens(self) -> list:
        """Remove from `_likely`, and return, the tokens whose characters certainly belong to the answer."""
        count = sum(token.start < self._certain for token in self._likely)
        tokens, self._likely = self._likely[:count], self._likely[count:]
        return tokens

    def close(self) -> list[Part]:
        if self.ended and self._end is None:
            rest = ""  # a stop string or a tool call ended the answer: the text after it does not belong to the answer
        else:
            rest = self._until_stop(self._new().rstrip(HALF)) + self._held
            self._certain += len(self._held)
        return self._parsed(rest) + self._last() + self._tokens()

    def _last(self) -> list:
        if self.parser is None:
            return []
        end = "" if self._end is None or self._end in self.silent else self._decoded([self._end])
        parts = self.parser.close(end, cut=self._end is None)
        if end and parts and isinstance(parts[-1], str):  # the parser takes `end` for text if its template lacks it
            parts[-1] = type(parts[-1])(parts[-1].removesuffix(end))
        return self._counted([part for part in parts if part])

    def _new(self) -> str:
        """Return the text of the ids after the first `_known`."""
        return self._decoded(self._ids)[len(self._decoded(self._ids[: self._known])) :]

    def _decoded(self, ids: list) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) if ids else ""

    def _until_stop(self, text: str) -> str:
        """Return `_held` and `text` up to a stop string, which ends the answer, or up to what may be the start of one,
        which is held back."""
        text = self._held + text
        cut = min((at for at in map(text.find, self.stops) if at >= 0), default=len(text))
        if cut < len(text):
            self.ended, self._end, self._held = True, None, ""
        else:
            begun = (n for stop in self.stops for n in range(1, len(stop)) if text.endswith(stop[:n]))
            cut -= max(begun, default=0)
            self._held = text[cut:]
        self._certain += cut
        return text[:cut]

    def _parsed(self, text: str) -> list:
        if self.parser is None:
            return [text] if text else []
        return self._counted(self.parser.parts(text)) if text else []

    def _counted(self, parts: list[Part]) -> list[Part]:
        """Append the tool calls among `parts` to `calls`. Returns the parts up to the tool call that ends the answer,
        if one does."""
        if self._called:
            return []
        for at, part in enumerate(parts):
            if isinstance(part, ToolCall):
                again = part in self.calls
                self.calls.append(part)
                if again or self.single:
                    self.ended, self._end, self._called = True, None, True
                    return parts[: at if again else at + 1]
        return parts
