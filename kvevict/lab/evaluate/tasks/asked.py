"""Tasks that vary the question's place in the prompt. The questions are about facts that are hidden in other text
(`settings.haystack`), and stand at four places in turn. A case's tag `place` is "last" if the question ends the prompt,
"before" if instructions of 30 to 100 tokens follow the question, "long" if the question stands within a request of 60
to 200 tokens, and "first" if the question stands before the text.

    asked           the answer is written freely
    asked/opened    the prompt ends with the first words of the answer, as small models need it

A text has facts of eight kinds (the six of many.py, a sentence, and a constant of source code) and one question of each
kind. `settings.cases` is the number of texts. A case's `said` is the question alone.
"""

import functools
from collections.abc import Iterator
from random import Random

from ..haystack import hide
from ..words import LISTS
from . import TASKS, Case, TaskSettings
from .many import drawn_facts

PLACES = ("last", "before", "long", "first")
ROOM = 24  # most tokens of a free answer before the fact
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
    """Draw a fact of each kind, in random order. Returns a list of (kind, statement, question, answers, the answer's
    opening)."""
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
    """Return (words before the text, words after it) that put a question at its place. `number` chooses among the
    wordings."""
    if place == "first":
        return f"Read the text with this question in mind: {question}\n\n", REMINDER
    if place == "before":
        return "", f"\n\n{question}\n\n{INSTRUCTIONS[number % len(INSTRUCTIONS)]}"
    return "", "\n\n" + (REQUESTS[number % len(REQUESTS)].format(asked=question) if place == "long" else question)


def asked(settings: TaskSettings, task: str = "asked", opened: bool = False) -> Iterator[Case]:
    chat = getattr(settings.tokenizer, "chat_template", None)
    opens, end = ("", "") if chat else ("Question: ", "\nAnswer:")
    for i in range(settings.cases):
        rng = settings.rng("asked", settings.length, i)
        facts = facts_of(rng)
        closed = [f"{end} {words}" if opened else end for *_, words in facts]
        prompts = (
            "".join(framed(place, f"{opens}{fact[2]}{closing}", wording)) for fact, closing in zip(facts, closed)
            for place in PLACES for wording in range(len(INSTRUCTIONS))
        )  # fmt: skip
        text, depths = hide(settings, rng, [fact[1] for fact in facts], prompts)
        for turn, which in enumerate(sorted(range(len(facts)), key=lambda which: facts[which][0])):
            (kind, _, question, answers, _), place = facts[which], PLACES[(turn + i) % len(PLACES)]
            before, after = framed(place, opens + question, i + which)
            tags = dict(length=settings.length, kind=kind, place=place, depth=round(depths[which], 2), text=i)
            id, new = f"{task}/{settings.length}/{i}/{kind}", settings.room(answers) + ROOM
            opening = closed[which].lstrip() if opened else ""
            asks = after + ("\n" + opening if opened else end)
            yield Case(task, id, before + text, asks, answers, "contains_any", new, tags, opening, one_line=True,
                       said=opens + question)  # fmt: skip


TASKS.add("asked")(asked)
TASKS.add("asked/opened")(functools.partial(asked, task="asked/opened", opened=True))
