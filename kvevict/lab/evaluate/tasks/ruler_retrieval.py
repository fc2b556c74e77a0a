"""RULER's eight needle tasks ("ruler/niah_...") and variable tracking ("ruler/vt")."""

import random
import string
import uuid
from collections.abc import Iterator
from itertools import islice, pairwise, repeat

from ..haystack import growing, haystack, most
from ..words import LISTS
from . import TaskSettings
from .ruler import PROMPTS, codes, distinct, fill, register

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind}s for {key} is: {value}."
DEPTHS = [round(100 * i / 39) / 100 for i in range(40)]  # of needles in essays are RULER's 40, in whole percents


def hidden(lines: list[str], facts: list[str], seed: float) -> str:
    """Join the lines with the facts among them, in the facts' order and each before another line."""
    at = sorted(random.Random(seed).sample(range(len(lines)), len(facts)))
    for moved, (i, fact) in enumerate(zip(at, facts)):
        lines.insert(i + moved, fact)
    return "\n".join(lines)


def drawn(rng: random.Random, kind: str) -> Iterator[str]:
    """Yield distinct keys or values without end: numbers of 7 digits, UUIDs, or words such as "mossy-anvil"."""
    draw = {
        "number": lambda: str(rng.randrange(10**6, 10**7)),
        "uuid": lambda: str(uuid.UUID(int=rng.getrandbits(128), version=4)),
        "word": lambda: f"{rng.choice(LISTS['adj'])}-{rng.choice(LISTS['noun'])}",
    }
    return distinct(draw[kind])


def niah(
    settings: TaskSettings, rng: random.Random, room: int, i: int, hay: str, key: str = "word", kind: str = "number",
    keys: int = 1, values: int = 1, queries: int = 1,
) -> tuple[str, str, list[str]]:  # fmt: skip
    """Hide `values` needles for each of `keys` keys in "noise", "essay" or other needles; ask for `queries` keys."""
    some_key, some_value = drawn(rng, key), drawn(rng, kind)
    sought = {k: list(islice(some_value, values)) for k in islice(some_key, keys)}
    needles = [NEEDLE.format(kind=kind, key=k, value=v) for k in sought for v in sought[k]]
    rng.shuffle(needles)
    asked = rng.sample(list(sought), queries)
    query = ", ".join(asked[:-1]) + (", and " if queries > 1 else "") + asked[-1]
    prompt = PROMPTS["needle" if queries * values == 1 else "needles"]
    before, after = (text.format(kind=kind, query=query) for text in prompt[:2])
    if hay == "essay":
        facts = dict(zip(rng.sample(DEPTHS, len(needles)), needles))
        body = haystack(settings).passage(rng, room, settings, facts, before, after)
    else:
        others = (NEEDLE.format(kind=kind, key=k, value=v) for k, v in zip(some_key, some_value))
        take, seed = growing(repeat(NOISE) if hay == "noise" else others), rng.random()
        body = fill(settings, room, before, lambda n: hidden(take(n), needles, seed), after, len(needles))
    return before + body, after, [v for k in asked for v in sought[k]]


def chain(rng: random.Random, length: int, value: int, hops: int = 4) -> tuple[list[str], list[str]]:
    """Draw variables of `length` letters, and the statements that give all of them one value: VAR A = 1, VAR B = VAR A,
    ... The copies end with a space, as RULER's do."""
    names = list(islice(codes(rng, string.ascii_uppercase, length), hops + 1))
    return names, [f"VAR {names[0]} = {value}", *(f"VAR {b} = VAR {a} " for a, b in pairwise(names))]


def vt(settings: TaskSettings, rng: random.Random, room: int, i: int) -> tuple[str, str, list[str]]:
    """Write a solved example of at most 500 tokens with three-letter variables, then the task with five-letter ones."""
    head, tail, _ = PROMPTS["vt"]
    known, value = rng.sample(range(10000, 99999), 2)
    (shown, shown_links), (names, links) = chain(rng, 3, known), chain(rng, 5, value)
    seed, least = rng.random(), len(links)

    def example(n: int) -> str:
        text = hidden([NOISE] * n, shown_links, seed)
        return head + text + tail.format(query=known, count=len(shown))

    more = 0 if settings.length < 4096 else most(lambda n: settings.tokens(example(least + n)) <= 500)
    before = example(least + more) + " " + " ".join(shown) + "\n\n" + head
    after = tail.format(query=value, count=len(names))
    body = fill(settings, room, before, lambda n: hidden([NOISE] * n, links, seed), after, least)
    return before + body, after, names


register("niah_single_1", "needle", niah, hay="noise")
register("niah_single_2", "needle", niah, hay="essay")
register("niah_single_3", "needle", niah, hay="essay", kind="uuid")
register("niah_multikey_1", "needle", niah, hay="essay", keys=4)
register("niah_multikey_2", "needle", niah, hay="needle")
register("niah_multikey_3", "needle", niah, hay="needle", key="uuid", kind="uuid")
register("niah_multivalue", "needles", niah, hay="essay", values=4)
register("niah_multiquery", "needles", niah, hay="essay", keys=4, queries=4)
register("vt", "vt", vt)
