"""A request's prompt as token ids."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..asking.prompts import MARK, first_ids, ids_of, pieces, rendered
from .errors import Refused


@dataclass(frozen=True)
class Prompt:
    """The token ids of a prompt.

    text  (start, stop) of the stored text that opens the prompt: the tokens up to `stop` are alike in each request
    """

    ids: list[int]
    text: tuple[int, int] | None = None


def _marked(message: dict, before: str) -> dict:
    """Put letters before a message's content, and remove `MARK` from the content."""
    content = message["content"].replace(MARK, "") if isinstance(message.get("content"), str) else ""
    return {**message, "content": before + content}


def of_messages(
    tokenizer: Any, messages: list[dict[str, Any]], template: dict[str, Any], context: int | None, text: str | None
) -> Prompt:
    """Make the prompt of a chat. A stored text opens it, in the first user's message and two line ends before that.

    Raises ValueError for a chat that the template refuses or changes.
    """
    if context is not None and len(messages) >= context:  # each message has a token or more
        raise too_long(context)
    if text is None:
        return joined(tokenizer, [(_plain, rendered(tokenizer, messages, "these messages", **template))], context)
    first = next((at for at, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        raise ValueError("a stored text opens the user's turn: give a message of the role user")
    # The parts before and after the text are tokenised separately, so that the text has the same ids in every request.
    marked = [_marked(message, MARK + "\n\n" if at == first else "") for at, message in enumerate(messages)]
    parts = rendered(tokenizer, marked, "these messages", **template).split(MARK)
    if len(parts) != 2:
        raise ValueError("the model's chat template does not give the first user's message once")
    return joined(tokenizer, [(_plain, parts[0]), (ids_of, text), (_plain, parts[1])], context)


def of_text(tokenizer: Any, prompt: str | list[int], context: int | None, text: str | None = None) -> Prompt:
    """Build a prompt from text or ids, without a chat template. A stored text precedes them, and a blank line."""
    if text is None:
        return joined(tokenizer, [(_opened, prompt)], context)
    rest: list = [(ids_of, f"\n\n{prompt}")] if isinstance(prompt, str) else [(ids_of, "\n\n"), (_opened, prompt)]
    return joined(tokenizer, [(_opened, ""), (ids_of, text), *rest], context)


def joined(
    tokenizer: Any, pieces: Sequence[tuple[Callable[[Any, str], list[int]], str | list[int]]], context: int | None
) -> Prompt:
    """Join pieces, each (tokenising function, text or ids), to a prompt. The first piece that `ids_of` tokenises, where
    special tokens are plain letters, is the stored text.

    Raises Refused as soon as the ids do not fit a context with an answer.
    """
    ids: list = []
    text = None
    for tokenise, letters in pieces:
        start, room = len(ids), None if context is None else context - 1 - len(ids)
        if isinstance(letters, list):
            more, whole = letters, room is None or len(letters) <= room
        elif room is None:
            more, whole = tokenise(tokenizer, letters), True
        else:
            more, whole = first_ids(tokenizer, letters, room, tokenise)
        if not whole:
            raise too_long(context, "text" if tokenise is ids_of and text is None else "prompt")
        ids.extend(more)
        if tokenise is ids_of and text is None:
            text = start, len(ids)
    return Prompt(ids, text)


def parts(tokenizer: Any, ids: list[int], shares: Any) -> list[list[Any]]:
    """Split a text into pieces: [letters, mean share of the piece's tokens]."""
    made, at = [], 0
    for letters, tokens in pieces(tokenizer, ids):
        made.append([letters, round(float(shares[at : at + tokens].mean()), 3)])
        at += tokens
    return made


def too_long(context: int | None, what: str = "prompt") -> Refused:
    sentence = f"the {what} has more tokens than the model's context of {context} leaves beside an answer: shorten it"
    return Refused(400, sentence, "context_length_exceeded")


def _plain(tokenizer: Any, text: str) -> list:
    """Tokenise a part of a rendered template, which has all special tokens already."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _opened(tokenizer: Any, text: str) -> list:
    """Tokenise a text, with the tokens that open every text."""
    return tokenizer(text, verbose=False)["input_ids"]
