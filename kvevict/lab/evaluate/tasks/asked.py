"""Tasks about the question's place: facts in other text (`settings.haystack`), each asked for in one of four ways.

    asked              all of these, in turn
    asked/last         the question ends the prompt
    asked/before       instructions of 30 to 100 tokens follow it
    asked/long         it stands within a request of 60 to 200 tokens
    asked/first        it stands before the text
    asked/opened       as `asked`, and the fact's words open the answer, as small models need it
    asked/numbers      as `asked`, about one of four facts like `recall`'s, of four relations: the bundled model can
                       answer these

A text has facts of eight kinds (those of `many`, a sentence, and a constant of source code) and one question of each
kind; `settings.cases` counts texts. A case's `said` is the question alone.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from random import Random
from typing import Any

from ..haystack import haystack
from ..words import LISTS
from . import TASKS, Case, Settings
from .many import drawn_facts
from .recall import RELATIONS, draw, statement

PLACES = ("last", "before", "long", "first")
ROOM = 24  # tokens for words before an answer without an opening
INSTRUCTIONS = (
    "Answer in one short sentence. Do not explain how you found it, do not repeat the question and do not add anything "
    "that the text does not say.",
    "Please write plain text without any markup. Use a single line, keep to what the text says, and write numbers, "
    "dates and names exactly as they are spelled there. If there is more than one candidate, give the first. Leave out "
    "greetings, comments and everything else that was not asked for.",
    "Format of your reply: one line of at most twenty words in English, with no list, no heading, no quotation marks "
    "and no closing remark. Replies that are longer than this will be cut off, and replies in another format will not "
    "be read at all, so please check the length and the format before you send it.",
)
REQUESTS = (
    "My sister and I read this together on the train last week, and since then we have not been able to agree about "
    "one small thing that is mentioned in passing. I lent the book to a friend this morning and cannot look it up. "
    "{asked} I would be glad to settle it before the weekend, because she comes to dinner on Saturday and has asked me "
    "twice already. There is no hurry today, though.",
    "I am preparing a lesson about careful reading, and I need a few details that most people skip the first time. "
    "{asked} The others I have found already. The lesson is on Thursday, the class is a friendly one, and nobody will "
    "be marked for a wrong answer, but I want to have the right ones at hand in case that somebody asks me for them "
    "at the end of the hour.",
)
REMINDER = "\n\nThat was the text. Now answer the question that was asked before it."
MORE = dict(
    sentence=('The motto over the door of the {of} reads: "{answer}."', "What is the motto over the door of the {of}?"),
    code=("The program of the {of} sets the constant {name}_LIMIT = {answer}.", "What is the value of {name}_LIMIT?"),
)


def facts_of(rng: Random) -> list[tuple]:
    """[(kind, statement, question, answers, opening)] of one text, one of each kind, in random order."""
    of_many = {}
    for kind, fact, asked, answers, counts in drawn_facts(rng):
        if counts:
            question, _, opened = asked.partition("Question: ")[2].partition("\nAnswer: ")
            of_many[kind] = kind, fact, question, answers, opened
    facts, said = [*of_many.values()], " ".join(fact for _, fact, *_ in of_many.values())
    for kind, (line, asked) in MORE.items():
        of, name = rng.sample([word for word in LISTS["noun"] if word not in said], 2)
        words = [rng.choice(LISTS[slot]) for slot in ("he", "did", "adj", "noun", "place")]
        answer = "{} {} the {} {} of {}".format(*words) if kind == "sentence" else str(rng.randrange(1_000, 10_000))
        filled = dict(of=of, name=name.upper())
        opened = line.partition("{answer}")[0].rstrip().format(**filled)
        facts.append((kind, line.format(answer=answer, **filled), asked.format(**filled), (answer,), opened))
    rng.shuffle(facts)
    return facts


def framed(place: str, question: str, number: int) -> tuple:
    """(words before the text, words after it) of a question, in the number-th wording."""
    if place == "first":
        return f"Read the text with this question in mind: {question}\n\n", REMINDER
    if place == "before":
        return "", f"\n\n{question}\n\n{INSTRUCTIONS[number % len(INSTRUCTIONS)]}"
    return "", "\n\n" + (REQUESTS[number % len(REQUESTS)].format(asked=question) if place == "long" else question)


def cases_of(
    settings: Settings,
    task: str,
    number: int,
    rng: Random,
    facts: list[tuple],
    asked: Iterable[tuple[str, int]],
    **tags: Any,
) -> Iterator[Case]:
    """Cases of a text with facts (kind, statement, question, answers, opening). asked: pairs (place, index of a
    fact)."""
    chat = getattr(settings.tokenizer, "chat_template", None)
    opens, end = ("", "") if chat else ("Question: ", "\nAnswer:")
    depths = [(each + rng.random()) / len(facts) for each in range(len(facts))]
    said = {depth: fact for depth, (_, fact, *_) in zip(depths, facts)}
    closed = [f"{end} {opened}" if opened else end for *_, opened in facts]
    longest = max(("".join(framed(place, f"{opens}{fact[2]}{closing}", wording)) for fact, closing in zip(facts, closed)
                   for place in PLACES for wording in range(len(INSTRUCTIONS))), key=settings.tokens)  # fmt: skip
    text = haystack(settings).passage(rng, settings.length, settings, facts=said, after=longest)
    for place, which in asked:
        kind, _, question, answers, opened = facts[which]
        before, after = framed(place, opens + question, number + which)
        about = dict(length=settings.length, kind=kind, place=place, depth=round(depths[which], 2)) | tags
        id, new = f"{task}/{settings.length}/{number}/{kind}", settings.room(answers) + ROOM
        opening = closed[which].lstrip() if opened else ""
        asks = after + ("\n" + opening if opened else end)
        yield Case(task, id, before + text, asks, answers, "contains_any", new, about, opening, one_line=True,
                   said=opens + question)  # fmt: skip


def asked(
    settings: Settings, places: Sequence[str] = PLACES, task: str = "asked", opened: bool = False
) -> Iterator[Case]:
    for i in range(settings.cases):
        rng = settings.rng("asked", settings.length, i)
        facts = [fact if opened else (*fact[:4], "") for fact in facts_of(rng)]
        by_kind = sorted(range(len(facts)), key=lambda which: facts[which][0])
        wanted = [(places[(turn + i) % len(places)], which) for turn, which in enumerate(by_kind)]
        yield from cases_of(settings, task, i, rng, facts, wanted, text=i)


def asked_numbers(settings: Settings, places: Sequence[str] = PLACES, task: str = "asked/numbers") -> Iterator[Case]:
    for i in range(settings.cases):
        rng = settings.rng("asked/numbers", settings.length, i)
        facts = [
            ("number", statement(relation, who, what), f"What is the {relation} of {who}?", (what,), "")
            for relation, (_, who, what) in zip(rng.sample(RELATIONS, 4), draw(rng, 4))
        ]
        yield from cases_of(settings, task, i, rng, facts, [(places[i // 4 % len(places)], i % 4)])


TASKS.add("asked")(asked)
TASKS.add("asked/opened")(functools.partial(asked, task="asked/opened", opened=True))
TASKS.add("asked/numbers")(asked_numbers)
for _place in PLACES:
    TASKS.add(f"asked/{_place}")(functools.partial(asked, places=(_place,), task=f"asked/{_place}"))
