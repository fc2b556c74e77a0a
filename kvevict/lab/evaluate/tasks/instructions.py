"""A task of instructions: a system prompt with two to five rules that code can check, a text, and a question.

    instructions   the share of the rules that the answer obeys, whatever it says; compare it with the full cache's

The text has facts at even depths (`settings.haystack`), and the question asks for one of them. `settings.cases` is the
number of prompts.
"""

import re
import string
from collections.abc import Callable, Iterator
from random import Random

from ..haystack import hide
from ..metrics import METRICS
from ..words import LISTS
from . import TASKS, Case, TaskSettings
from .asked import facts_of

ROOM = 80  # most tokens of an answer
FEWEST, MOST = 2, 5  # number of rules of a system prompt
WORDS = 25  # most words of an answer under the rule `short`


def said(text: str) -> list[str]:
    """Return a text's words in small letters, without the punctuation around them."""
    return [word for word in (each.strip(string.punctuation).casefold() for each in text.split()) if word]


# {name: (the rule's sentence, with {word} for a word; whether an answer obeys it)}
RULES: dict[str, tuple[str, Callable[[str, str], bool]]] = dict(
    capitals=("Write the whole answer in capital letters.", lambda text, _: text == text.upper() != text.lower()),
    begin=("Begin every answer with the word {word}.", lambda text, word: said(text)[:1] == [word.casefold()]),
    end=("End every answer with the word {word}.", lambda text, word: said(text)[-1:] == [word.casefold()]),
    digits=("Never write a digit: spell numbers out in words.", lambda text, _: not re.search(r"\d", text)),
    comma=("Never use a comma.", lambda text, _: "," not in text),
    short=(f"Use at most {WORDS} words.", lambda text, _: len(text.split()) <= WORDS),
    mention=("Mention the word {word} somewhere in every answer.", lambda text, word: word.casefold() in said(text)),
    quoted=(
        'Put the whole answer between double quotation marks (").',
        lambda text, _: bool(re.fullmatch('".*"', text)),
    ),
)


@METRICS.add("rules")
def rules(prediction: str, answers: tuple[str, ...]) -> float:
    """Return the share of the rules, each written NAME or NAME:WORD, that the prediction obeys; 0 if it is empty."""
    text = " ".join(prediction.split())
    obeyed = [RULES[name][1](text, word) for name, _, word in (each.partition(":") for each in answers)]
    return sum(obeyed) / len(obeyed) if text else 0.0


def drawn(rng: Random) -> list[str]:
    """Draw the rules of one system prompt, each NAME or NAME:WORD."""
    names = rng.sample(sorted(RULES), rng.randint(FEWEST, MOST))
    words = rng.sample(LISTS["noun"], len(names))
    return [f"{name}:{word}" if "{word}" in RULES[name][0] else name for name, word in zip(names, words, strict=True)]


def system_of(given: list[str]) -> str:
    """Write the system prompt of some rules."""
    sentences = [RULES[name][0].format(word=word) for name, _, word in (each.partition(":") for each in given)]
    listed = "\n".join(f"{number}. {sentence}" for number, sentence in enumerate(sentences, 1))
    return f"You answer questions about a text. Obey these rules in every answer:\n{listed}"


@TASKS.add("instructions")
def instructions(settings: TaskSettings) -> Iterator[Case]:
    for i in range(settings.cases):
        rng = settings.rng("instructions", settings.length, i)
        facts, given = facts_of(rng), drawn(rng)
        kind, _, question, _, _ = rng.choice(facts)
        asked = f"\n\n{question}"
        text, _ = hide(settings, rng, [fact[1] for fact in facts], [system_of(given) + asked])
        tags = dict(length=settings.length, rules=len(given), kind=kind)
        yield Case(
            "instructions", f"instructions/{settings.length}/{i}", text, asked, tuple(given), "rules", ROOM, tags,
            said=question, system=system_of(given),
        )  # fmt: skip
