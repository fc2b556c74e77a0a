"""Tasks that ask for made-up facts, which are hidden in other text or, in `keyvalue`, listed.

    needle       four facts about four names, the one asked for at each of the settings' depths
    facts        eight facts about eight names anywhere
    multivalue   eight facts, two to four of them about the name that is asked for
    tracking     eight facts, three of them in a chain: the first name's value is that of a second name, and so on
    keyvalue     as many lines "name: value" as fit
    listed       the numbers of twelve lockers at even depths, all asked for in order: the long answer walks through
                 the text. The score is the share of the numbers that are in the answer

Names, except those of `listed`, are invented from syllables. The bundled model was trained on such facts
(examples/small_llama), but never on a name with `held_out` true, and these tasks use only such names.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise, product
from random import Random

from ..haystack import haystack, hide, most
from ..words import LISTS
from . import TASKS, Case, TaskSettings, opening

RELATIONS = ("code", "number", "key", "price", "level", "score", "mark", "signal")
LOCKERS = 12  # number of facts of the task `listed`
ENTRY = 16  # tokens of a line of the answer of `listed`, without the number's
LISTED = (
    "\n\nQuestion: The text says in which locker the parcel of each of twelve people lies. List all twelve in the "
    "text's order, one in a line, each with the number of the locker."
    "\nAnswer: 1. The parcel for the {who} lies in locker"
)
Fact = tuple[str, str, str]  # (relation, name, value)
Build = Callable[[Random, list[Fact]], tuple]
_ONSETS = tuple("b br c ch d dr f g gr h j k l m n p qu r s sh st t th tr v w z".split())  # noqa: SIM905
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "oo")
_MIDDLES = ("", "", "", "l", "m", "n", "r", "s")
_CODAS = ("", "ck", "d", "l", "m", "n", "nd", "ng", "p", "r", "rn", "s", "sk", "st", "t", "th", "x")


def name(rng: Random) -> str:
    """Invent a name of two syllables, e.g. "Breamuth"."""
    parts = (_ONSETS, _VOWELS, _MIDDLES, _ONSETS, _VOWELS, _CODAS)
    return "".join(map(rng.choice, parts)).capitalize()


def held_out(word: str) -> bool:
    """Return whether a name is kept out of the training data; one name in eight is."""
    return zlib.crc32(word.encode()) % 8 == 0


def unseen_names(rng: Random, count: int) -> list[str]:
    """Draw `count` different names that are in no training sequence."""
    names = set()
    while len(names) < count:
        word = name(rng)
        if held_out(word):
            names.add(word)
    return rng.sample(sorted(names), count)


def value(rng: Random) -> str:
    return str(rng.randrange(100_000, 1_000_000))


def statement(relation: str, who: str, what: str) -> str:
    return f"The {relation} of {who} is {what}."


def question(relation: str, who: str) -> str:
    return f"\n\nQuestion: What is the {relation} of {who}?\nAnswer: The {relation} of {who} is"


def question_all(relation: str, who: str) -> str:
    return f"\n\nQuestion: What are all the {relation}s of {who}?\nAnswer: The {relation}s of {who} are"


def line(who: str, what: str) -> str:
    return f"{who}: {what}\n"


def line_question(who: str) -> str:
    return f"\nQuestion: Which value has {who}?\nAnswer: {who}:"


def one_line(
    settings: TaskSettings, task: str, id: str, context: str, asked: str, answers: tuple[str, ...], metric: str,
    tags: dict,
) -> Case:  # fmt: skip
    """Make a case whose answer is one line. The question ends with the answer's opening."""
    room = settings.room(answers, every=metric == "contains_all")
    return Case(task, id, context, asked, answers, metric, room, tags, opening(asked), one_line=True)


def draw(rng: Random, count: int) -> list[Fact]:
    """Draw `count` facts about different names, with different values."""
    values = rng.sample(range(100_000, 1_000_000), count)
    return [(rng.choice(RELATIONS), who, str(what)) for who, what in zip(unseen_names(rng, count), values)]


def of_facts(name: str, count: int = 8, at_depths: bool = False) -> Callable[[Build], Build]:
    """Return a decorator that registers a task of `count` facts. The decorated function build(rng, facts) returns
    (facts, question, answers, metric, further tags) of a case. The first fact is at each of the settings' depths in
    turn if `at_depths`, else anywhere like the other facts."""

    def register(build: Build) -> Build:
        @TASKS.add(name)
        def cases(settings: TaskSettings) -> Iterator[Case]:
            depths: list[tuple] = [(depth,) for depth in settings.depths] if at_depths else [()]
            for depth, i in product(depths, range(settings.cases)):
                place = settings.length, *depth, i
                rng = settings.rng(name, *place)
                facts, asked, answers, metric, more = build(rng, draw(rng, count))
                tags = dict(length=settings.length, **dict(zip(["depth"], depth)), facts=count) | more
                where = [*(depth or [rng.random()]), *(rng.random() for _ in facts[1:])]
                said = {at: statement(*fact) for at, fact in zip(where, facts)}
                context = haystack(settings).passage(rng, settings.length, settings, facts=said, after=asked)
                id = "/".join(map(str, (name, *place)))
                yield one_line(settings, name, id, context, asked, answers, metric, tags)

        return build

    return register


@of_facts("facts")
@of_facts("needle", 4, at_depths=True)
def one_of_them(rng: Random, facts: list[Fact]) -> tuple:
    relation, who, what = facts[0]
    return facts, question(relation, who), (what,), "exact", {}


@of_facts("multivalue")
def several_of_one(rng: Random, facts: list[Fact]) -> tuple:
    wanted = rng.randint(2, 4)
    relation, who, _ = facts[0]
    facts[:wanted] = [(relation, who, what) for _, _, what in facts[:wanted]]
    answers = tuple(what for _, _, what in facts[:wanted])
    return facts, question_all(relation, who), answers, "contains_all", dict(values=wanted)


@of_facts("tracking")
def chained(rng: Random, facts: list[Fact]) -> tuple:
    relation, _, what = facts[2]
    names = [who for _, who, _ in facts[:3]]
    facts = [(relation, *fact[1:]) for fact in facts]
    facts[:2] = [(relation, a, f"that of {b}") for a, b in pairwise(names)]
    steps = " ".join(statement(*fact) for fact in facts[:3]).removeprefix(f"The {relation} of {names[0]} is ")
    return facts, question(relation, names[0]), (steps.removesuffix("."), what), "exact", dict(hops=2)


@TASKS.add("keyvalue")
def keyvalue(settings: TaskSettings) -> Iterator[Case]:
    for i in range(settings.cases):
        rng = settings.rng("keyvalue", settings.length, i)
        facts = draw(rng, max(1, settings.length // 6))  # a line has more than 6 tokens
        place = rng.random()

        def fits(n: int, facts: list = facts, place: float = place) -> bool:
            prompt = lines(facts[:n]) + line_question(facts[int(place * n) % len(facts)][1])
            return n <= len(facts) and settings.tokens(prompt) <= settings.length

        count = most(fits, settings.length // 10)
        if count == 0:
            raise ValueError(f"length: {settings.length} tokens are too few for a line and its question; give more")
        chosen = int(place * count)
        _, who, what = facts[chosen]
        tags = dict(length=settings.length, facts=count, depth=round(chosen / max(1, count - 1), 2))
        case, asked = f"keyvalue/{settings.length}/{i}", line_question(who)
        yield one_line(settings, "keyvalue", case, lines(facts[:count]), asked, (what,), "exact", tags)


def lines(facts: Iterable[Fact]) -> str:
    return "".join(line(who, what) for _, who, what in facts)


@TASKS.add("listed")
def listed(settings: TaskSettings) -> Iterator[Case]:
    for i in range(settings.cases):
        rng = settings.rng("listed", settings.length, i)
        people, numbers = rng.sample(LISTS["trade"], LOCKERS), rng.sample(range(10_000, 100_000), LOCKERS)
        facts = [f"The parcel for the {who} lies in locker {number}." for who, number in zip(people, numbers)]
        asked = LISTED.format(who=people[0])
        context, _ = hide(settings, rng, facts, [asked])
        answers, tags = tuple(map(str, numbers)), dict(length=settings.length, text=i)
        room = settings.room(answers, every=True) + LOCKERS * ENTRY
        yield Case("listed", f"listed/{settings.length}/{i}", context, asked, answers, "contains_all", room, tags,
                   opening(asked))  # fmt: skip
