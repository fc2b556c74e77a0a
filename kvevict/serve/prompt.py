"""A request's prompt as token ids, and where it may be cut into prefixes that other requests share."""

from dataclasses import dataclass

from ..prompts import MARK, ids_of, rendered

LEAST = 64  # tokens of a prefix beyond the one before it


@dataclass(frozen=True)
class Prompt:
    """ids, and the ends of prefixes of it that do not depend on what comes after them, ascending, each below its
    length."""

    ids: list
    ends: tuple = ()


def of_messages(tokenizer, messages: list, template: dict, text: str | None = None) -> Prompt:
    """A chat, cut before every user's message; `text` opens the first of them, which it ends two lines before.

    Raises ValueError for a chat that the template refuses or changes.
    """
    # A mark where a user's message begins: what is before it is tokenised apart, alike in every request.
    first, marked = True, []
    for message in messages:
        content = message["content"].replace(MARK, "") if isinstance(message.get("content"), str) else ""
        if message["role"] == "user":
            content = MARK + ("\n\n" if first and text is not None else "") + content
            first = False
        marked.append({**message, "content": content})
    if first and text is not None:
        raise ValueError("a stored text opens the user's turn: give a message of the role user")
    head, *parts = rendered(tokenizer, marked, "these messages", **template).split(MARK)
    if len(parts) != sum(message["role"] == "user" for message in messages):
        raise ValueError("the model's chat template does not give every user's message once: ask with a question")
    pieces = [_plain(tokenizer, head), *(_plain(tokenizer, part) for part in parts)]
    if text is not None:
        pieces.insert(1, ids_of(tokenizer, text))
    return joined(pieces)


def of_text(tokenizer, prompt: str, text: str | None = None) -> Prompt:
    """A prompt without a template; a stored text ends two lines before it."""
    if text is None:
        return Prompt(tokenizer(prompt, verbose=False)["input_ids"])
    return joined([tokenizer("")["input_ids"] + ids_of(tokenizer, text), ids_of(tokenizer, f"\n\n{prompt}")])


def joined(pieces: list) -> Prompt:
    """A prompt of pieces, each of which may end a prefix, where it is long enough; the last one ends none."""
    ids: list = []
    ends: tuple = ()
    for piece in pieces[:-1]:
        ids = ids + piece
        if len(ids) - (ends[-1] if ends else 0) >= LEAST:
            ends += (len(ids),)
    return Prompt(ids + pieces[-1], ends)


def _plain(tokenizer, text: str) -> list:
    """Ids of a part of a rendered template, whose special tokens are meant."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
