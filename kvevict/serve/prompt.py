"""Builds a request's prompt as token ids."""

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
    text: tuple[int, int] | None = None  # (start, stop) of the stored text in `ids`; None: no stored text


def _marked(message: Json, before: str) -> Json:
    """Return a message with the character `MARK` removed from its content and `before` put in front of the content."""
    content = message["content"].replace(MARK, "") if isinstance(message.get("content"), str) else ""
    return {**message, "content": before + content}


def of_messages(
    tokenizer: Tokenizer, messages: list[Json], template: Json, context: int | None,
    text: str | None,
) -> PromptIds:  # fmt: skip
    """Build the prompt of a chat with the chat template. The stored text `text`, if any, is put in front of the first
    user message, and a blank line between the two. Raises ValueError if the template refuses the messages, or does not
    render the first user message exactly once."""
    if context is not None and len(messages) >= context:  # each message has at least one token
        raise too_long(context)
    if text is None:
        return joined(tokenizer, [(_plain, rendered(tokenizer, messages, "these messages", **template))], context)
    first = next((at for at, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        raise ValueError("a stored text opens the user's turn: give a message of the role user")
    # The stored text is tokenised alone, so that it has the same ids in every request.
    marked = [_marked(message, MARK + "\n\n" if at == first else "") for at, message in enumerate(messages)]
    parts = rendered(tokenizer, marked, "these messages", **template).split(MARK)
    if len(parts) != 2:
        raise ValueError("the model's chat template does not give the first user's message once")
    return joined(tokenizer, [(_plain, parts[0]), (ids_of, text), (_plain, parts[1])], context)


def of_text(tokenizer: Tokenizer, prompt: str | list[int], context: int | None, text: str | None = None) -> PromptIds:
    """Build a prompt from a text or ids, without a chat template. The stored text `text`, if any, and a blank line are
    put in front."""
    if text is None:
        return joined(tokenizer, [(_opened, prompt)], context)
    rest: list[tuple[Tokenise, str | list[int]]] = (
        [(ids_of, f"\n\n{prompt}")] if isinstance(prompt, str) else [(ids_of, "\n\n"), (_opened, prompt)]
    )
    return joined(tokenizer, [(_opened, ""), (ids_of, text), *rest], context)


def joined(tokenizer: Tokenizer, pieces: Sequence[tuple[Tokenise, str | list[int]]], context: int | None) -> PromptIds:
    """Tokenise the pieces of a prompt, each (tokenising function, text or ids), and join their ids. The first piece
    with the function `ids_of` is the stored text. Raises Refused if the ids leave no position of the context for a
    token of an answer. context: number of positions; None: no limit."""
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
    """Split token ids into short texts, and return [text, mean share of the text's tokens] for each. shares: one number
    per id (`shares_of`)."""
    made, at = [], 0
    for text, tokens in pieces(tokenizer, ids):
        made.append([text, round(float(shares[at : at + tokens].mean()), 3)])
        at += tokens
    return made


def too_long(context: int | None, what: str = "prompt") -> Refused:
    sentence = f"the {what} has more tokens than the model's context of {context} leaves beside an answer: shorten it"
    return Refused(400, sentence, "context_length_exceeded")


def _plain(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokenise a part of a rendered chat template, whose text contains all special tokens already."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _opened(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokenise a text, with the special tokens that the tokenizer puts in front (BOS)."""
    return tokenizer(text, verbose=False)["input_ids"]
