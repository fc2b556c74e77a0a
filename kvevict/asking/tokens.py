"""Finds the tokens of a prompt that hold a text."""

from bisect import bisect_left
from collections.abc import Iterable

from .prompts import Tokenizer


def find(tokenizer: Tokenizer, ids: list[int], text: str) -> tuple[int, int] | None:
    """Find (start, stop) of the fewest ids whose decoded text contains the last occurrence of `text`, white space
    aside; None if `text` does not occur."""
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
    """Return the index of the id after the one in which the last of the marks begins, or of the next id that is not
    white space. Without a mark in the last `most` ids, return None, or 0 if there are at most `most` ids. Empty marks
    do not count."""

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
    """Return a text without its white space."""
    return "".join(text.split())
