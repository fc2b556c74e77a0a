"""Makes long filler text, and hides facts in it.

    text = haystack(settings).passage(rng, tokens, settings)
    text = haystack(settings).passage(rng, tokens, settings, facts={0.5: "The code is 7."}, before=intro, after=asked)

`haystack(settings)` reads `settings.haystack` (a .txt, a folder of them, or .jsonl or .jsonl.xz with a field "text").
If that setting is None, it makes English sentences from words.py, which have no digits and are not copied from a
corpus. All draws are from `rng`, so equal seeds give equal text.
"""

from __future__ import annotations

import functools
import lzma
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, islice
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from ...policy.checks import parsed
from ...store.files import decoded
from .words import LISTS, TEMPLATES

if TYPE_CHECKING:
    from .tasks import TaskSettings

SENTENCE = re.compile(r"\S.*?(?:(?<!\bMr)(?<!\bMrs)(?<!\bDr)(?<!\bSt)[.!?][\"')\]”’]*(?= [^a-z]|$)|$)")
LONGEST = 80  # most words of a sentence: without full stops (verse, tables) a sentence could fill a passage


def sentences(text: str) -> list[str]:
    """Split a text into sentences that, joined by spaces, are the text with its white space normalised."""
    whole = (s.split() for s in SENTENCE.findall(" ".join(text.split())))
    return [" ".join(s[i : i + LONGEST]) for s in whole for i in range(0, len(s), LONGEST)]


def insert(text: str, facts: dict[float, str]) -> str:
    """Insert each fact between two sentences of the text, as near to the fact's depth as possible: 0 is the text's
    start, 1 its end."""
    if wrong := [depth for depth in facts if not 0 <= depth <= 1]:
        raise ValueError(f"facts: depth {wrong[0]} must be between 0 (the text's start) and 1 (its end)")
    parts = sentences(text)
    starts = [0, *accumulate(len(part) + 1 for part in parts)]
    for depth in sorted(facts, reverse=True):
        at = min(range(len(starts)), key=lambda i: abs(starts[i] - depth * starts[-1]))
        parts.insert(at, facts[depth])
    return " ".join(parts)


def most(fits: Callable[[int], bool], guess: int = 1) -> int:
    """Find the largest n >= 0 with `fits(n)`, which is true up to some n and false beyond. `guess` is tried first;
    `fits(0)` is not called."""
    low, n, step = 0, max(guess, 1), 1
    high: float = math.inf
    while high - low > 1:
        low, high = (n, high) if fits(n) else (low, n)
        if high == math.inf:
            n = low + step
        elif low == 0:
            n = max(int(high) - step, 1)
        else:
            n = (low + int(high)) // 2
        step *= 2
    return low


def growing(source: Iterator[str]) -> Callable[[int], list[str]]:
    """Return a function take(n) that returns the first n items of an iterator, at every call, or all items if there are
    fewer."""
    items: list[str] = []

    def take(n: int) -> list[str]:
        items.extend(islice(source, max(n - len(items), 0)))
        return items[:n]

    return take


class Haystack:
    """An endless source of text: the sentences of `documents` or, without documents, made-up sentences."""

    def __init__(self, documents: Sequence[str] = ()) -> None:
        self.documents = documents
        self.split = functools.cache(lambda i: sentences(documents[i]))

    def sentences(self, rng: Random) -> Iterator[str]:
        """Yield sentences without end, from a random sentence of a random document on. After the last document follows
        the first."""
        if not self.documents:
            yield from made_up(rng)
        which = rng.choices(range(len(self.documents)), list(map(len, self.documents)))[0]
        yield from self.split(which)[rng.randrange(len(self.split(which))) :]
        while True:
            which = (which + 1) % len(self.documents)
            yield from self.split(which)

    def passage(
        self, rng: Random, tokens: int, settings: TaskSettings, facts: dict[float, str] | None = None,
        before: str = "", after: str = "",
    ) -> str:  # fmt: skip
        """Return as many whole sentences, with the facts (depth: text) inserted, as keep `before + passage + after`
        within `tokens` tokens, or a part of a sentence if no whole one fits. Raises ValueError if nothing fits."""

        def text(parts: list) -> str:
            return insert(" ".join(parts), facts or {})

        def room(parts: list) -> int:
            return tokens - settings.tokens(before + text(parts) + after)

        if (left := room([])) < 0:
            raise ValueError(f"length: {tokens} tokens are too few for the task's own {tokens - left}; give more")
        take, guess = growing(self.sentences(rng)), 0
        while left >= 0:  # a guess: the sentences' tokens add up to about the text's
            guess += 1
            left -= settings.tokens(" " + take(guess)[-1])
        if n := most(lambda n: room(take(n)) >= 0, guess - 1):
            return text(take(n))
        words = take(1)[0].split()
        return text([" ".join(words[: most(lambda n: n <= len(words) and room([" ".join(words[:n])]) >= 0)])])


def made_up(rng: Random) -> Iterator[str]:
    """Yield English sentences without end, in paragraphs about two people and a place."""
    while True:
        A, B = rng.sample(LISTS["he"] + LISTS["she"], 2)
        he, his = ("he", "his") if A in LISTS["he"] else ("she", "her")
        cast = {"A": A, "B": B, "P": rng.choice(LISTS["place"]), "he": he, "his": his}
        for template in rng.sample(TEMPLATES, rng.randint(4, 9)):
            yield filled(template, cast, rng)


def filled(template: str, cast: dict[str, str], rng: Random) -> str:
    """Fill the slots of a template: with the cast's words where it has any, else with random words, none of them
    twice."""
    seen = set()

    def word(match: re.Match) -> str:
        slot = match[1]
        if slot in cast:
            return cast[slot]
        lower = slot.lower()
        drawn = cast.get(lower) or rng.choice([w for w in LISTS[lower] if w not in seen])
        seen.add(drawn)
        return drawn if slot == lower else drawn[0].upper() + drawn[1:]

    return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", re.sub(r"\{(\w+)\}", word, template))


def words(rng: Random) -> Iterator[str]:
    """Yield distinct words without end: those of words.py in random order, then compounds such as "harbourlantern"."""
    listed = sorted({word for slot in ("noun", "adj", "did") for word in LISTS[slot]})
    rng.shuffle(listed)
    yield from listed
    seen = set(listed)
    while True:
        word = "".join(rng.sample(LISTS["noun"], 2))
        if word not in seen:
            seen.add(word)
            yield word


def haystack(settings: TaskSettings) -> Haystack:
    """Return the haystack of the settings. Raises ValueError if its file is missing or of another format."""
    return Haystack() if settings.haystack is None else _read(Path(settings.haystack))


def hide(settings: TaskSettings, rng: Random, facts: Sequence[str], asked: Iterable[str]) -> tuple[str, list[float]]:
    """Hide n facts in a text, one in each n-th part of the text. Returns the text, which leaves room for the longest of
    the questions `asked`, and the facts' depths."""
    depths = [(part + rng.random()) / len(facts) for part in range(len(facts))]
    said, longest = dict(zip(depths, facts)), max(asked, key=settings.tokens)
    return haystack(settings).passage(rng, settings.length, settings, facts=said, after=longest), depths


@functools.lru_cache(maxsize=2)
def _read(path: Path) -> Haystack:
    try:
        files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
        documents = [text for file in files for text in _documents(file)]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"haystack: cannot read {path} ({error!r}); give a .txt, a folder of them, or a .jsonl or "
            ".jsonl.xz with the field 'text'"
        ) from None
    documents = [text for text in documents if text.strip()]
    if not documents:
        raise ValueError(f"haystack: {path} has no text; give another file")
    return Haystack(documents)


def _documents(path: Path) -> list[str]:
    return [record["text"] for record in records(path)] if ".jsonl" in path.suffixes else [text_of(path)]


def text_of(path: Path) -> str:
    """Read the text of a file, which is compressed if its name ends in .xz. Raises ValueError with the file's name for
    bytes that are not xz or not text."""
    data = path.read_bytes()
    if path.suffix == ".xz":
        try:
            data = lzma.decompress(data)
        except lzma.LZMAError as error:
            raise ValueError(f"{path} is not an intact .xz file ({error}); give one") from None
    return decoded(data, path)


def records(path: Path) -> list[Any]:
    """Read a file with a JSON value in each line. Raises ValueError with the file's name for other files."""
    lines = text_of(path).split("\n")
    try:
        return [parsed(line) for line in lines if line.strip()]
    except ValueError as error:
        raise ValueError(f"{path} has a line that is not JSON ({error}); give a file of JSON lines") from None
