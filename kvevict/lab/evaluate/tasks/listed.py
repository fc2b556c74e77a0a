"""A task with a long answer that walks through the text: twelve facts of one kind are hidden in other text
(`settings.haystack`), at even depths, and one request asks for all of them in order.

    listed    the numbers of twelve lockers; the score is the share of them that the answer has
"""

from collections.abc import Iterator

from ..haystack import hide
from ..words import LISTS
from . import TASKS, Case, TaskSettings, opening

FACTS = 12
LINE = 16  # tokens of an entry beside its number
ASKED = (
    "\n\nQuestion: The text says in which locker the parcel of each of twelve people lies. List all twelve in the "
    "text's order, one in a line, each with the number of the locker."
    "\nAnswer: 1. The parcel for the {who} lies in locker"
)


@TASKS.add("listed")
def listed(settings: TaskSettings) -> Iterator[Case]:
    for i in range(settings.cases):
        rng = settings.rng("listed", settings.length, i)
        people, numbers = rng.sample(LISTS["trade"], FACTS), rng.sample(range(10_000, 100_000), FACTS)
        facts = [f"The parcel for the {who} lies in locker {number}." for who, number in zip(people, numbers)]
        asked = ASKED.format(who=people[0])
        context, _ = hide(settings, rng, facts, [asked])
        answers, tags = tuple(map(str, numbers)), dict(length=settings.length, text=i)
        room = settings.room(answers, every=True) + FACTS * LINE
        yield Case("listed", f"listed/{settings.length}/{i}", context, asked, answers, "contains_all", room, tags,
                   opening(asked))  # fmt: skip
