"""RULER's eleven tasks of made-up text (Hsieh et al. 2024): needles ("ruler/niah_..."), variable tracking ("ruler/vt"),
and the most frequent words of a list ("ruler/cwe") or of a code ("ruler/fwe"). lm-eval has RULER's other two, of SQuAD
and HotpotQA.

Parameters are those of RULER's `synthetic.yaml`, wording and construction those of its `scripts/data/synthetic`
(github.com/NVIDIA/RULER at c3f5e3b). Prompt and generated tokens together fit `settings.length`, and a prompt has as
many of its task's units (lines, words) as fit. Deliberate differences:
- the essay haystack is `settings.haystack`, in whole sentences (RULER: Paul Graham's essays, always from their start);
- every case is drawn separately (RULER places and shuffles all cases alike), with distinct keys, values and words;
- below 4096 tokens, RULER's shortest length, `vt`'s solved example is as short as possible;
- generation ends with a one-line answer's line, or once the right answer's number of tokens is reached;
- words are those of words.py, not of the package wonderwords.
"""

import math
import random
import string
import uuid
from collections.abc import Callable, Iterator
from itertools import islice, pairwise, repeat

from ..haystack import growing, haystack, most, words
from ..words import LISTS
from . import TASKS, Case, TaskSettings, opening

# From RULER's constants.py, {prompt: (words before the units, question after them, number of tokens to generate)}. The
# question ends with the answer's beginning, which a chat template gives to the assistant.
PROMPTS = {
    "needle": (
        "A special magic {kind} is hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the {kind} afterwards.\n",
        "\nWhat is the special magic {kind} for {query} mentioned in the provided text?"
        " The special magic {kind} for {query} mentioned in the provided text is", 128),
    "needles": (
        "Some special magic {kind}s are hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the {kind}s afterwards.\n",
        "\nWhat are all the special magic {kind}s for {query} mentioned in the provided text?"
        " The special magic {kind}s for {query} mentioned in the provided text are", 128),
    "vt": (
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n",
        "\nQuestion: Find all variables that are assigned the value {query} in the text above."
        " Answer: According to the chain(s) of variable assignment in the text above, "
        "{count} variables are assigned the value {query}, they are: ", 30),
    "cwe": (
        "Below is a numbered list of words. In these words, some appear more often than others. "
        "Memorize the ones that appear most often.\n",
        "\nQuestion: What are the 10 most common words in the above list?"
        " Answer: The top 10 words that appear most often in the list are:", 120),
    "fwe": (
        "Read the following coded text and track the frequency of each coded word. "
        "Find the three most frequently appeared coded words. ",
        "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. "
        "What are the three most frequently appeared words in the above coded text?"
        " Answer: According to the coded text above, the three most frequently appeared words are:", 50),
}  # fmt: skip
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind}s for {key} is: {value}."
DEPTHS = [round(100 * i / 39) / 100 for i in range(40)]  # RULER's 40 depths of a needle in essays, in percent steps


def register(name: str, prompt: str, build: Callable[..., tuple[str, str, list[str]]], **parameters: str | int) -> None:
    """Register the task "ruler/<name>". `build(settings, rng, room, **parameters)` makes a case's (context, question,
    answers), whose context and question have at most `room` tokens together."""
    name, published = f"ruler/{name}", PROMPTS[prompt][2]
    mark = "The special" if prompt.startswith("needle") else "Answer:"

    @TASKS.add(name)
    def cases(settings: TaskSettings) -> Iterator[Case]:
        for i in range(settings.cases):
            rng, room = settings.rng(name, i), settings.length - published
            context, question, answers = build(settings, rng, room, **parameters)
            id, tags = f"{name}/{settings.length}/{i}", {"length": settings.length}
            new_tokens = min(published, settings.room(answers, every=True))
            how = new_tokens, tags, opening(question, mark), prompt in ("needle", "vt")
            yield Case(name, id, context, question, tuple(answers), "contains_all", *how)


def fill(settings: TaskSettings, room: int, before: str, body: Callable[[int], str], after: str, least: int) -> str:
    """Return `body(n)` for the largest n >= least with which `before + body(n) + after` has at most `room` tokens."""

    def size(n: int) -> int:
        return settings.tokens(before + body(n) + after)

    start = size(least)
    if start > room:
        shortest = settings.length - room + start
        raise ValueError(f"length: {settings.length} is too short for the task; give at least {shortest}")
    guess = 16 * (room - start) // max(size(least + 16) - start, 1)
    return body(least + most(lambda n: size(least + n) <= room, guess))


def shuffled(items: list, seed: float) -> list:
    """Return a shuffled copy. The order depends only on the seed and the number of items, so that `fill` can try
    several numbers."""
    return random.Random(seed).sample(items, len(items))


def distinct(draw: Callable[[], str]) -> Iterator[str]:
    """Yield distinct results of `draw()` without end."""
    seen = set()
    while True:
        if (new := draw()) not in seen:
            seen.add(new)
            yield new


def codes(rng: random.Random, alphabet: str, length: int) -> Iterator[str]:
    """Yield distinct strings of random letters of the alphabet, without end."""
    return distinct(lambda: "".join(rng.choices(alphabet, k=length)))


def hidden(lines: list[str], facts: list[str], seed: float) -> str:
    """Join the lines with the facts among them, in the facts' order, each fact before a different line."""
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
    settings: TaskSettings, rng: random.Random, room: int, hay: str, key: str = "word", kind: str = "number",
    keys: int = 1, values: int = 1, queries: int = 1,
) -> tuple[str, str, list[str]]:  # fmt: skip
    """Hide `values` needles for each of `keys` keys in `hay`: "noise", "essay" or other needles ("needle"). The
    question asks for `queries` of the keys."""
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


def vt(settings: TaskSettings, rng: random.Random, room: int) -> tuple[str, str, list[str]]:
    """Make a prompt of a solved example with three-letter variables (at most 500 tokens) and the task with five-letter
    variables."""
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


def numbered(items: list[str]) -> str:
    return " ".join(f"{i}. {item}" for i, item in enumerate(items, 1))


def mixed(chosen: list[str], common: int, often: int, rarely: int, seed: float) -> str:
    """Return a numbered list, in random order, of the first `common` words `often` times each and of the other words
    `rarely` times each."""
    return numbered(shuffled(chosen[:common] * often + chosen[common:] * rarely, seed))


def cwe(settings: TaskSettings, rng: random.Random, room: int, common: int = 10) -> tuple[str, str, list[str]]:
    """Make a prompt of a solved example and the list. Below 4096 tokens words occur less often, as in RULER's code."""
    size, shown, asked = (20, (3, 1), (6, 1)) if settings.length < 4096 else (40, (10, 3), (30, 3))
    seed, (before, after) = rng.random(), PROMPTS["cwe"][:2]
    take = growing(words(rng))
    example = before + mixed(take(size), common, *shown, seed) + after + " " + numbered(take(common)) + "\n" + before

    def body(n: int) -> str:
        return mixed(take(size + n)[size:], common, *asked, seed)

    text = fill(settings, room, example, body, after, common + 1)
    return example + text, after, take(size + common)[size:]


def fwe(settings: TaskSettings, rng: random.Random, room: int) -> tuple[str, str, list[str]]:
    """Make a text in which the k-th most frequent word has the share k^-2 / ζ(2). The first word is the noise "...",
    the next three are the answers."""
    zeta, seed, (before, after) = math.pi**2 / 6, rng.random(), PROMPTS["fwe"][:2]
    coded = ["...", *islice(codes(rng, string.ascii_lowercase, 6), max(room // 50 - 1, 4))]

    def counts(n: int) -> list[int]:
        return [int(n / (zeta * k**2)) for k in range(1, len(coded) + 1)]

    def body(n: int) -> str:
        while counts(n)[3] == counts(n)[4]:  # in 42 to 52 words the last answer is as frequent as the next word
            n -= 1
        return " ".join(shuffled([word for word, count in zip(coded, counts(n)) for _ in range(count)], seed))

    return before + fill(settings, room, before, body, after, math.ceil(16 * zeta)), after, coded[1:4]


register("niah_single_1", "needle", niah, hay="noise")
register("niah_single_2", "needle", niah, hay="essay")
register("niah_single_3", "needle", niah, hay="essay", kind="uuid")
register("niah_multikey_1", "needle", niah, hay="essay", keys=4)
register("niah_multikey_2", "needle", niah, hay="needle")
register("niah_multikey_3", "needle", niah, hay="needle", key="uuid", kind="uuid")
register("niah_multivalue", "needles", niah, hay="essay", values=4)
register("niah_multiquery", "needles", niah, hay="essay", keys=4, queries=4)
register("vt", "vt", vt)
register("cwe", "cwe", cwe)
register("fwe", "fwe", fwe)
