"""The shared parts of RULER's eleven tasks of made-up text (Hsieh et al. 2024); ruler_*.py have the tasks, such as
"ruler/niah_single_1". RULER's two tasks of SQuAD and HotpotQA are in lm-eval.

Parameters are those of RULER's `synthetic.yaml`, wording and construction those of its `scripts/data/synthetic`
(github.com/NVIDIA/RULER at c3f5e3b). Prompt and generated tokens together fit `settings.length`, and a prompt has as
many of its task's units (lines, words) as fit. Deliberate differences:
- the essay haystack is `settings.haystack`, in whole sentences (RULER: Paul Graham's essays, always from their start);
- every case is drawn separately (RULER places and shuffles all cases alike), with distinct keys, values and words;
- below 4096 tokens, RULER's shortest length, `vt`'s solved example is as short as possible;
- generation ends with a one-line answer's line, or once the right answer's number of tokens is reached;
- words are those of words.py, not of the package wonderwords.
"""

import random
from collections.abc import Callable, Iterator

from ..haystack import most
from . import TASKS, Case, TaskSettings, opening

# RULER's constants.py: words before the units; the question after them with the answer's beginning, which a chat
# template gives to the assistant; and the number of tokens to generate.
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


def register(name: str, prompt: str, build: Callable[..., tuple[str, str, list[str]]], **parameters: str | int) -> None:
    """Add the task "ruler/<name>". `build(settings, rng, room, i, **parameters)` makes case i's (context, question,
    answers), where context and question have at most `room` tokens."""
    name, published = f"ruler/{name}", PROMPTS[prompt][2]
    mark = "The special" if prompt.startswith("needle") else "Answer:"

    @TASKS.add(name)
    def cases(settings: TaskSettings) -> Iterator[Case]:
        for i in range(settings.cases):
            rng, room = settings.rng(name, i), settings.length - published
            context, question, answers = build(settings, rng, room, i, **parameters)
            id, tags = f"{name}/{settings.length}/{i}", {"length": settings.length}
            new_tokens = min(published, settings.room(answers, every=True))
            how = new_tokens, tags, opening(question, mark), prompt in ("needle", "vt")
            yield Case(name, id, context, question, tuple(answers), "contains_all", *how)


def fill(settings: TaskSettings, room: int, before: str, body: Callable[[int], str], after: str, least: int) -> str:
    """Return `body(n)` of the largest n >= least with `before + body(n) + after` within `room` tokens."""

    def size(n: int) -> int:
        return settings.tokens(before + body(n) + after)

    start = size(least)
    if start > room:
        shortest = settings.length - room + start
        raise ValueError(f"length: {settings.length} is too short for the task; give at least {shortest}")
    guess = 16 * (room - start) // max(size(least + 16) - start, 1)
    return body(least + most(lambda n: size(least + n) <= room, guess))


def shuffled(items: list, seed: float) -> list:
    """Return a shuffled copy. Its order depends on the seed and the length alone, since `fill` tries several
    lengths."""
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
