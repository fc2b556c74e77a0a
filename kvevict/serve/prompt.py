"""A request's prompt as token ids, and the places where it may be cut into prefixes that other requests share."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from ..prompts import MARK, first_ids, ids_of, pieces, rendered
from .errors import Refused

LEAST = 64  # tokens of a prefix beyond the one before it


@dataclass(frozen=True)
class Prompt:
    """ids
    ends  ascending and below the length: tokens before an end do not depend on those after it
    text  where the stored text that opens the prompt starts and stops
    """

    ids: list[int]
    ends: tuple[int, ...] = ()
    text: tuple[int, int] | None = None


def of_chat(tokenizer: Any, messages: list[dict[str, Any]], template: dict[str, Any], context: int | None) -> Prompt:
    """Make the prompt of a chat as one piece."""
    check_count(messages, context)
    return joined(tokenizer, [(_plain, rendered(tokenizer, messages, "these messages", **template))], context)


def chat_cuts(
    tokenizer: Any, messages: list[dict[str, Any]], template: dict[str, Any], prompt: Prompt
) -> tuple[int, ...]:
    """Find the ends of a chat's beginnings: before each user's message, if a token ends there. None are found if the
    template changes a message with a mark before it, or the tokenizer does not say where its tokens are."""
    if not tokenizer.is_fast:
        return ()
    marked = [_marked(message) if message["role"] == "user" else message for message in messages]
    try:
        parts = rendered(tokenizer, marked, "these messages", **template).split(MARK)
    except ValueError:
        return ()
    told = tokenizer("".join(parts), add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    if told["input_ids"] != prompt.ids:
        return ()
    return _places(told["offset_mapping"], list(accumulate(map(len, parts[:-1]))))


def _places(offsets: list, letters: list) -> tuple:
    """Count the tokens before each of `letters`, positions in a text, if a token begins there. offsets: (first letter,
    the one after the last) of every token."""
    starts = [start for start, _ in offsets]
    found = ((bisect_left(starts, letter), letter) for letter in letters)
    return tuple(
        place for place, letter in found
        if 0 < place < len(starts) and starts[place] == letter and offsets[place - 1][1] <= letter
    )  # fmt: skip


def _marked(message: dict, before: str = "") -> dict:
    """Put a mark where a message's content begins."""
    content = message["content"].replace(MARK, "") if isinstance(message.get("content"), str) else ""
    return {**message, "content": MARK + before + content}


def of_messages(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    template: dict[str, Any],
    context: int | None,
    text: str | None = None,
) -> Prompt:
    """Make the prompt of a chat, with an end before every user's message. `text` opens the first one, two lines before
    it.

    Raises ValueError for a chat that the template refuses or changes.
    """
    check_count(messages, context)
    # A mark where a user's message begins: the part before it is tokenised apart, alike in every request.
    first, marked = True, []
    for message in messages:
        if message["role"] == "user":
            marked.append(_marked(message, "\n\n" if first and text is not None else ""))
            first = False
        else:
            marked.append({**message, "content": _marked(message)["content"].removeprefix(MARK)})
    if first and text is not None:
        raise ValueError("a stored text opens the user's turn: give a message of the role user")
    parts = rendered(tokenizer, marked, "these messages", **template).split(MARK)
    if len(parts) - 1 != sum(message["role"] == "user" for message in messages):
        raise ValueError("the model's chat template does not give every user's message once: ask with a question")
    pieces = [(_plain, part) for part in parts]
    if text is not None:
        pieces.insert(1, (ids_of, text))
    return joined(tokenizer, pieces, context)


def of_text(tokenizer: Any, prompt: str | list[int], context: int | None, text: str | None = None) -> Prompt:
    """Make a prompt of letters or ids without a template; a stored text ends two lines before it."""
    if text is None:
        return joined(tokenizer, [(_opened, prompt)], context)
    rest: list = [(ids_of, f"\n\n{prompt}")] if isinstance(prompt, str) else [(ids_of, "\n\n"), (_opened, prompt)]
    return joined(tokenizer, [(_opened, ""), (ids_of, text), *rest], context)


def joined(
    tokenizer: Any, pieces: Sequence[tuple[Callable[[Any, str], list[int]], str | list[int]]], context: int | None
) -> Prompt:
    """Join pieces, each (tokenising function, letters or ids), to a prompt. Each but the last ends a prefix that is
    long enough. A piece whose special tokens are letters (`ids_of`) is a stored text.

    Raises Refused as soon as the ids do not fit a context with an answer.
    """
    ids: list = []
    ends: list = []
    text = None
    for at, (tokenise, letters) in enumerate(pieces):
        start, room = len(ids), None if context is None else context - 1 - len(ids)
        if isinstance(letters, list):
            more, whole = letters, room is None or len(letters) <= room
        elif room is None:
            more, whole = tokenise(tokenizer, letters), True
        else:
            more, whole = first_ids(tokenizer, letters, room, tokenise)
        if not whole:
            raise too_long(context)
        ids.extend(more)
        if tokenise is ids_of and text is None:
            text = start, len(ids)
        if at < len(pieces) - 1 and len(ids) - (ends[-1] if ends else 0) >= LEAST:
            ends.append(len(ids))
    return Prompt(ids, tuple(ends), text)


def parts(tokenizer: Any, ids: list[int], shares: Any) -> list[list[Any]]:
    """Part a text into pieces: [letters, the mean of its tokens' shares]."""
    made, at = [], 0
    for letters, tokens in pieces(tokenizer, ids):
        made.append([letters, round(float(shares[at : at + tokens].mean()), 3)])
        at += tokens
    return made


def check_count(messages: list[dict[str, Any]], context: int | None) -> None:
    """Raise Refused for a chat of more messages than its context has tokens."""
    if context is not None and len(messages) >= context:
        raise too_long(context)


def too_long(context: int | None) -> Refused:
    sentence = f"the prompt has at least {context} tokens, and the model's context is {context}: shorten it"
    return Refused(400, sentence, "context_length_exceeded")


def _plain(tokenizer: Any, text: str) -> list:
    """Tokenise a part of a rendered template, which has its special tokens."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _opened(tokenizer: Any, text: str) -> list:
    """Tokenise a text, with the tokens that open every text."""
    return tokenizer(text, verbose=False)["input_ids"]
