"""Tasks with many questions about one text. The questions are consecutive cases with an equal context, so that an
evaluation reads the text once per run (mode later).

    many                facts of six kinds in other text (`settings.haystack`), at even depths
    many/paraphrased    the facts of `many`; the questions use other words than the text
    many/xquad          articles of XQuAD or SQuAD, joined up to the length
    many/loogle         the first tokens of a LooGLE text, and the questions with their evidence in them

`settings.cases` is the number of texts. The likelihood of the right answer, as the text words it, is measured too.
"""

import ast
import functools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from random import Random

from ..haystack import hide, most, records, sentences, text_of
from ..words import LISTS
from . import MARGIN, TASKS, Case, TaskSettings, opening

EACH = 2  # number of questions of each kind about a text
QUESTIONS = 24  # most questions about a text of many/xquad or many/loogle
AFTER = 3  # tokens that an answer may have beyond the right one's: few, since its opening is given
MORE_KEYS = 2  # number of further facts of the kind "keys", in the same wording, which no question asks for

# {kind: (subjects, ((statement, question, the question in other words), ...))}. {of} is the fact's subject, {answer}
# what is asked for; the statement's words before {answer} open the answer. Two facts of a kind in one text have
# different wordings, but all facts of "keys" share one wording.
SAID = dict(
    digits=(LISTS["house"], (
        ("The safe in the {of} opens with the combination {answer}.", "Which combination opens the safe in the {of}?",
         "What would a burglar have to dial in the {of}?"),
        ("The number painted on the door of the {of} is {answer}.", "What number is painted on the door of the {of}?",
         "Which figures does a visitor see who knocks at the {of}?"),
        ("In its first year the {of} cost the town {answer} pounds.", "How many pounds did the {of} cost at first?",
         "What did the citizens spend on the {of} to begin with?"),
    )),
    words=(LISTS["house"], (
        ("The password of those who guard the {of} is {answer}.", "What is the password of those who guard the {of}?",
         "What must one say to be let into the {of}?"),
        ("On the sign above the {of} there is a painted {answer}.", "What is painted on the sign above the {of}?",
         "Which picture does one see over the entrance of the {of}?"),
        ("The children gave the {of} a nickname, the {answer}.", "Which nickname did the children give the {of}?",
         "What do boys and girls call the {of} in fun?"),
    )),
    names=(LISTS["ship"], (
        ("The captain of the ship {of} is called {answer}.", "What is the captain of the ship {of} called?",
         "Who commands the {of}?"),
        ("The cook who sailed on the {of} was named {answer}.", "What was the cook who sailed on the {of} named?",
         "Who made the meals aboard the {of}?"),
        ("The {of} was built by a carpenter by the name of {answer}.", "By which carpenter was the {of} built?",
         "Whose hands made the {of}?"),
    )),
    dates=(LISTS["ship"], (
        ("The ship {of} was launched on {answer}.", "On which day was the ship {of} launched?",
         "When did the {of} first touch the water?"),
        ("The {of} was lost with all her cargo on {answer}.", "On which day was the {of} lost?",
         "When did the {of} go down?"),
        ("The last letter from the {of} was written on {answer}.", "When was the last letter from the {of} written?",
         "When did anybody hear from the {of} for the last time?"),
    )),
    places=(LISTS["trade"], (
        ("The {of} was born in the village of {answer}.", "In which village was the {of} born?",
         "Where does the {of} come from?"),
        ("After the war the {of} moved to {answer}.", "Where did the {of} move after the war?",
         "Where did the {of} settle once there was peace?"),
        ("The {of} hid the silver in a cellar in {answer}.", "Where is the cellar in which the {of} hid the silver?",
         "Where would one dig for the treasure of the {of}?"),
    )),
    keys=(LISTS["trade"], (
        ("The key of the {of} hangs on hook number {answer}.", "On which hook does the key of the {of} hang?",
         "Where is what unlocks the door of the {of}?"),
        ("The parcel for the {of} lies in locker {answer}.", "In which locker does the parcel for the {of} lie?",
         "Where can the {of} collect what the post brought?"),
    )),
)  # fmt: skip


def value(rng: Random, kind: str) -> tuple[str, ...]:
    """Draw the answer to a question of a kind. Returns all accepted spellings, the text's own spelling first."""
    if kind == "digits":
        number = rng.randrange(10_000, 100_000)
        return str(number), f"{number:,}"
    if kind == "keys":
        return (str(rng.randrange(100, 1_000)),)
    if kind == "words":
        return (f"{rng.choice(LISTS['colour'])} {rng.choice(LISTS['beast'])}",)
    if kind == "names":
        return (f"{rng.choice(LISTS['he'])} {rng.choice(LISTS['surname'])}",)
    if kind == "places":
        return (rng.choice(LISTS["place"]),)
    day, month, year = rng.randint(1, 28), rng.choice(LISTS["month"]), rng.randint(1780, 1899)
    return f"{day} {month} {year}", f"{month} {day}, {year}"


def drawn_facts(rng: Random, paraphrased: bool = False) -> list[tuple[str, str, str, tuple[str, ...], bool]]:
    """Draw the facts of one text, a list of (kind, statement, question with the answer's opening, answers, whether the
    question is asked). No two facts have the same subject, and no two facts of a kind the same answer."""
    facts, used = [], set()
    for kind, (subjects, lines) in SAID.items():
        count = EACH + MORE_KEYS * (kind == "keys")
        said = [rng.choice(lines)] * count if kind == "keys" else rng.sample(lines, count)
        about, values = rng.sample([subject for subject in subjects if subject not in used], count), set()
        while len(values) < count:
            values.add(value(rng, kind))
        stated = zip(said, about, rng.sample(sorted(values), count), strict=True)
        for number, ((line, *wordings), of, answers) in enumerate(stated):
            used.add(of)
            asked, opened = wordings[paraphrased].format(of=of), line[: line.index(" {answer}")].format(of=of)
            question = f"\n\nQuestion: {asked}\nAnswer: {opened}"
            facts.append((kind, line.format(of=of, answer=answers[0]), question, answers, number < EACH))
    rng.shuffle(facts)
    return facts


def one(
    settings: TaskSettings, task: str, text: int, number: int, context: str, asked: str, answers: tuple[str, ...],
    after: int = MARGIN, metric: str = "contains_any", **tags: object,
) -> Case:  # fmt: skip
    """Make the case of question `number` about text `text`. The answer may have `after` tokens more than the right
    one."""
    tags, case = dict(length=settings.length, text=text) | tags, f"{task}/{settings.length}/{text}/{number}"
    room, opens = settings.room(answers) - MARGIN + after, opening(asked)
    return Case(task, case, context, asked, answers, metric, room, tags, opens, one_line=True, likelihood=True)


def many(settings: TaskSettings, task: str = "many", paraphrased: bool = False) -> Iterator[Case]:
    for i in range(settings.cases):
        rng = settings.rng("many", settings.length, i)
        facts = drawn_facts(rng, paraphrased)
        context, depths = hide(settings, rng, [fact[1] for fact in facts], [fact[2] for fact in facts])
        for number, ((kind, _, asked, answers, counts), depth) in enumerate(zip(facts, depths)):
            if counts:
                depth = round(depth, 2)
                yield one(settings, task, i, number, context, asked, answers, AFTER, kind=kind, depth=depth)


TASKS.add("many")(many)
TASKS.add("many/paraphrased")(functools.partial(many, task="many/paraphrased", paraphrased=True))


def plain(question: str) -> str:
    return f"\n\nQuestion: {question.strip()}\nAnswer:"


def file_of(settings: TaskSettings, task: str, pattern: str, origin: str) -> Path:
    """Return the first file in `settings.data` that matches `pattern`. Raises ValueError if none does."""
    found = [] if settings.data is None else sorted(Path(settings.data).glob(pattern))
    if not found:
        raise ValueError(f"data: {task} found no {pattern} in {settings.data}; give the folder that has it ({origin})")
    return found[0]


def asked_of(
    settings: TaskSettings, rng: Random, task: str, text: int, context: str,
    pairs: Sequence[tuple[str, Iterable[str]]], metric: str = "contains_any",
) -> Iterator[Case]:  # fmt: skip
    """Draw at most `QUESTIONS` of the pairs (question, answers) about a text, and yield their cases."""
    for number, (question, answers) in enumerate(rng.sample(pairs, min(len(pairs), QUESTIONS))):
        yield one(settings, task, text, number, context, plain(question), tuple(answers), metric=metric)


@TASKS.add("many/xquad")
def xquad(settings: TaskSettings) -> Iterator[Case]:
    """Yield questions about XQuAD's or SQuAD's paragraphs, with the articles in random order. A text has as many whole
    paragraphs as fit, and no paragraph is used twice."""
    task = "many/xquad"
    path = file_of(settings, task, "*.json", "xquad.en.json of the repository google-deepmind/xquad")
    try:
        articles = [
            [(p["context"], [(q["question"], q["answers"]) for q in p["qas"] if q["answers"]]) for p in a["paragraphs"]]
            for a in json.loads(text_of(path))["data"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"data: {path} is not in SQuAD's format ({error!r}); give xquad.en.json") from None
    rng = settings.rng(task, settings.length)
    rng.shuffle(articles)
    left = [paragraph for article in articles for paragraph in article]
    for i in range(settings.cases):
        longest = max((plain(question) for _, asked in left for question, _ in asked), key=len, default="")

        def fits(n: int, longest: str = longest, left: list = left) -> bool:
            context = "\n\n".join(text for text, _ in left[:n])
            return n <= len(left) and settings.tokens(context + longest) <= settings.length

        n = most(fits)
        if n in (0, len(left)):  # nothing fits, or the paragraphs end before the length is reached
            raise ValueError(
                f"data: {path} has too little text for {settings.cases} of {settings.length} tokens; give fewer "
                "--cases, other --lengths or more articles"
            )
        taken, left = left[:n], left[n:]
        pairs = [(q, dict.fromkeys(a["text"] for a in answers)) for _, asked in taken for q, answers in asked]
        yield from asked_of(settings, rng, task, i, "\n\n".join(text for text, _ in taken), pairs)


@TASKS.add("many/loogle")
def loogle(settings: TaskSettings) -> Iterator[Case]:
    """Yield questions about the beginning of a text, as many whole sentences as fit the length; only questions whose
    evidence is in these sentences are asked."""
    task = "many/loogle"
    path = file_of(settings, task, "shortdep_qa.jsonl", "the hub's dataset bigai-nlco/LooGLE")
    articles = list(enumerate(records(path)))
    for i, record in settings.rng(task).sample(articles, len(articles))[: settings.cases]:
        try:
            known = [(q["Q"], [q["A"]], " ".join(q["S"].split())) for q in ast.literal_eval(record["qa_pairs"])]
            parts = sentences(record["input"])
        except (ValueError, SyntaxError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"data: {path} is not LooGLE's shortdep_qa ({error!r}); give that") from None
        longest = max((plain(question) for question, *_ in known), key=len)

        def fits(n: int, parts: list = parts, longest: str = longest) -> bool:
            return n <= len(parts) and settings.tokens(" ".join(parts[:n]) + longest) <= settings.length

        context = " ".join(parts[: most(fits, settings.length // 32)])
        pairs = [(question, answers) for question, answers, evidence in known if evidence in context]
        yield from asked_of(settings, settings.rng(task, i), task, i, context, pairs, "f1_line")
