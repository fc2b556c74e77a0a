"""RULER's aggregation tasks: the most frequent words of a list ("ruler/cwe") or of a code ("ruler/fwe")."""

import math
import string
from itertools import islice
from random import Random

from ..haystack import growing, words
from . import TaskSettings
from .ruler import PROMPTS, codes, fill, register, shuffled


def numbered(items: list[str]) -> str:
    return " ".join(f"{i}. {item}" for i, item in enumerate(items, 1))


def mixed(chosen: list[str], common: int, often: int, rarely: int, seed: float) -> str:
    """Number, in random order, the first `common` words `often` times each and the others `rarely` times."""
    return numbered(shuffled(chosen[:common] * often + chosen[common:] * rarely, seed))


def cwe(settings: TaskSettings, rng: Random, room: int, i: int, common: int = 10) -> tuple[str, str, list[str]]:
    """Write a solved example, then the list. Below 4096 tokens words come less often, as in RULER's code."""
    size, shown, asked = (20, (3, 1), (6, 1)) if settings.length < 4096 else (40, (10, 3), (30, 3))
    seed, (before, after) = rng.random(), PROMPTS["cwe"][:2]
    take = growing(words(rng))
    example = before + mixed(take(size), common, *shown, seed) + after + " " + numbered(take(common)) + "\n" + before

    def body(n: int) -> str:
        return mixed(take(size + n)[size:], common, *asked, seed)

    text = fill(settings, room, example, body, after, common + 1)
    return example + text, after, take(size + common)[size:]


def fwe(settings: TaskSettings, rng: Random, room: int, i: int) -> tuple[str, str, list[str]]:
    """Write a text in which the k-th of n words takes the share k^-2 / ζ(2). The first word is the noise "...", the
    next three are the answers."""
    zeta, seed, (before, after) = math.pi**2 / 6, rng.random(), PROMPTS["fwe"][:2]
    coded = ["...", *islice(codes(rng, string.ascii_lowercase, 6), max(room // 50 - 1, 4))]

    def counts(n: int) -> list[int]:
        return [int(n / (zeta * k**2)) for k in range(1, len(coded) + 1)]

    def body(n: int) -> str:
        while counts(n)[3] == counts(n)[4]:  # for n of 42 to 52 the last answer is no more frequent than the next word
            n -= 1
        return " ".join(shuffled([word for word, count in zip(coded, counts(n)) for _ in range(count)], seed))

    return before + fill(settings, room, before, body, after, math.ceil(16 * zeta)), after, coded[1:4]


register("cwe", "cwe", cwe)
register("fwe", "fwe", fwe)
