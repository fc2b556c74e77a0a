"""A request's prompt as token ids."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ..asking.prompts import MARK, Tokenizer, first_ids, ids_of, pieces, rendered
from .errors import Json, Refused

Tokenise: TypeAlias = Callable[[Tokenizer, str], list[int]]


@dataclass(frozen=True)
class PromptIds:
    """The token ids of a prompt."""

    ids: list[int]
    text: tuple[int, int] | None = None  # (start, stop) of the stored text: the ids before `stop` are always the same


def _marked(message: Json, before: str) -> Json:
    """Remove `MARK` from a message's content, and put `before` in front of it."""
    content = message["content"].replace(MARK, "") if isinstance(message.get("content"), str) else ""
    return {**message, "content": before + content}


def of_messages(
    tokenizer: Tokenizer, messages: list[Json], template: Json, context: int | None,
    text: str | None,
) -> PromptIds:  # fmt: skip
    """Build the prompt of a chat. A stored text opens the first user's message, and a blank line follows it. Raises
    ValueError for a chat that the template refuses or changes."""
    if context is not None and len(messages) >= context:  # each message has at least a token
        raise too_long(context)
    if text is None:
        return joined(tokenizer, [(_plain, rendered(tokenizer, messages, "these messages", **template))], context)
    first = next((at for at, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        raise ValueError("a stored text opens the user's turn: give a message of the role user")
    # The text is tokenised apart from what surrounds it, so that it has the same ids in every request.
    marked = [_marked(message, MARK + "\n\n" if at == first else "") for at, message in enumerate(messages)]
    parts = rendered(tokenizer, marked, "these messages", **template).split(MARK)
    if len(parts) != 2:
        raise ValueError("the model's chat template does not give the first user's message once")
    return joined(tokenizer, [(_plain, parts[0]), (ids_of, text), (_plain, parts[1])], context)


def of_text(tokenizer: Tokenizer, prompt: str | list[int], context: int | None, text: str | None = None) -> PromptIds:
    """Build a prompt from text or ids, without a chat template. A stored text and a blank line precede it."""
    if text is None:
        return joined(tokenizer, [(_opened, prompt)], context)
    rest: list[tuple[Tokenise, str | list[int]]] = (
        [(ids_of, f"\n\n{prompt}")] if isinstance(prompt, str) else [(ids_of, "\n\n"), (_opened, prompt)]
    )
    return joined(tokenizer, [(_opened, ""), (ids_of, text), *rest], context)


def joined(tokenizer: Tokenizer, pieces: Sequence[tuple[Tokenise, str | list[int]]], context: int | None) -> PromptIds:
    """Join pieces, each (tokenising function, text or ids), to a prompt. The stored text is the first piece of
    `ids_of`. Raises Refused as soon as the ids leave no room in the context for a token of an answer."""
    ids: list[int] = []
    text = None
    for tokenise, given in pieces:
        start, room = len(ids), None if context is None else context - 1 - len(ids)
        if isinstance(given, list):
            more, whole = given, room is None or len(given) <= room
        elif room is None:
            more, whole = tokenise(tokenizer, given), True
        else:
            more, whole = first_ids(tokenizer, given, room, tokenise)
        if not whole:
            raise too_long(context, "text" if tokenise is ids_of and text is None else "prompt")
        ids.extend(more)
        if tokenise is ids_of and text is None:
            text = start, len(ids)
    return PromptIds(ids, text)


def parts(tokenizer: Tokenizer, ids: list[int], shares: np.ndarray) -> list[list[Any]]:
    """Split ids into pieces [text, mean share of its tokens]. shares: a number for each id."""
    made, at = [], 0
    for text, tokens in pieces(tokenizer, ids):
        made.append([text, round(float(shares[at : at + tokens].mean()), 3)])
        at += tokens
    return made


def too_long(context: int | None, what: str = "prompt") -> Refused:
    sentence = f"the {what} has more tokens than the model's context of {context} leaves beside an answer: shorten it"
    return Refused(400, sentence, "context_length_exceeded")


def _plain(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokenise a part of a rendered template, whose text has all special tokens already."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _opened(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokenise a text with the special tokens at its start (BOS)."""
    return tokenizer(text, verbose=False)["input_ids"]
