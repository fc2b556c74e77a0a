"""Finds requests that draw on the whole text (summarise, list all, translate, rewrite) by words of their language, and
warns of one if a policy keeps a part of the text."""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ..cautions import once
from ..policy.policy import Policy

LONG, LONGEST = 120, 300  # most characters of a request that has a pair of words, or a word of `summarise`
ENDS = 3  # number of sentences at either end of a turn that may request something
# The gap between two sentences, which may be a single mark where a script has no spaces
GAP = re.compile(r"\n|(?<=[.!?\u061f\u0964\u06d4])\s+|(?<=[\u3002\uff01\uff1f])")


class Words(NamedTuple):
    """Words of one language, as regular expressions. A sentence requests the whole text if it has a word of
    `summarise`, or words of both columns of a pair."""

    summarise: str
    make: str  # with `summary`
    summary: str
    name: str  # with `every`
    every: str
    rewrite: str  # with `text`
    text: str

    def request(self, sentence: str) -> bool:
        def has(words: str) -> bool:
            return bool(re.search(words, sentence))

        pairs = (self.make, self.summary), (self.name, self.every), (self.rewrite, self.text)
        short = len(sentence) <= LONG
        return has(self.summarise) or (short and any(has(one) and has(other) for one, other in pairs))


@functools.cache
def languages() -> tuple[Words, ...]:
    """Read whole.tsv: the `Words` of each language. In some languages words stand between spaces, in others not."""
    _, *lines = Path(__file__).with_name("whole.tsv").read_text("utf-8").splitlines()
    found = []
    for line in lines:
        _, spacing, *columns = line.split("\t")
        edge = r"\b" if spacing == "spaced" else ""
        found.append(Words(*(f"{edge}(?:{column}){edge}" for column in columns)))
    return tuple(found)


def request_of(turn: str) -> str | None:
    """Return the sentence of a user's turn, near the turn's start or end, that requests the whole text; None if there
    is none."""
    sentences = [each for each in map(str.strip, GAP.split(turn)) if each]
    ends = sentences if len(sentences) <= 2 * ENDS else [*sentences[-ENDS:], *sentences[:ENDS]]
    for sentence in ends:
        if len(sentence) <= LONGEST and any(each.request(sentence.casefold()) for each in languages()):
            return sentence
    return None


def of_whole(policy: Policy, seen: int, turn: Callable[[], str]) -> None:
    """Warn, once per budget, if turn(), the last user's, requests the whole of a text of `seen` tokens, of which
    `policy` keeps a part and no archive the rest."""
    budget = policy.slots(seen)
    if policy.recall or seen <= budget:
        return
    asked = request_of(turn())
    if asked is not None:
        once(
            ("whole", policy.budget),
            f"{asked[:80]!r} draws on the whole text, and each head keeps {budget} of its {seen} slots, so that much "
            "is left out: give recall=True, with which an answer attends to all, or a larger budget",
        )
