"""Finds the place of a text among a prompt's ids."""

from bisect import bisect_left
from collections.abc import Iterable

from .prompts import Tokenizer


def find(tokenizer: Tokenizer, ids: list[int], text: str) -> tuple[int, int] | None:
    """Find the (start, stop) of the fewest ids that hold the last occurrence of a text, white space aside; None if the
    ids do not have the text."""
    wanted = squeezed(text)

    def has(start: int, stop: int) -> bool:
        return wanted in squeezed(tokenizer.decode(ids[start:stop], clean_up_tokenization_spaces=False))

    start, size = len(ids), 64
    while start > 0 and not has(start, len(ids)):
        start, size = max(start - size, 0), 2 * size
    if not has(start, len(ids)):
        return None
    start += bisect_left(range(start, len(ids)), True, key=lambda at: not has(at, len(ids))) - 1
    return start, start + bisect_left(range(start, len(ids)), True, key=lambda at: has(start, at))


def start_after(tokenizer: Tokenizer, ids: list[int], marks: Iterable[str], most: int) -> int | None:
    """Count the ids up to the last of the marks in their text, with the white space after it. Returns None if the last
    `most` ids have none of the marks; an empty mark does not count."""

    def text(start: int, stop: int | None = None) -> str:
        return tokenizer.decode(ids[start:stop], clean_up_tokenization_spaces=False)

    def has(start: int) -> bool:
        return any(mark and mark in text(start) for mark in marks)

    first = max(0, len(ids) - most)
    if first and not has(first):
        return None
    first += bisect_left(range(first, len(ids)), True, key=lambda start: not has(start))
    while first < len(ids) and not text(first, first + 1).strip():
        first += 1
    return first


def squeezed(text: str) -> str:
    """Remove all white space."""
    return "".join(text.split())
