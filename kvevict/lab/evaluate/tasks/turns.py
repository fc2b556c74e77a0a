"""Tasks of conversations: ten turns about one text, each after the model's own earlier answers (evaluate/turns.py).
Eight turns ask questions of a task of many.py, without the answers' openings; turns 5 and 10 repeat earlier questions.

    turns               twelve facts of six kinds in other text, at even depths
    turns/paraphrased   the facts of `turns`; the questions use other words than the text
    turns/mixed         the facts of `turns`; turns 3, 6 and 9 ask for several facts at once (tag `asks`: "broad"), the
                        others for one ("narrow"). The score is the share of the wanted facts
    turns/xquad         the questions of `many/xquad`, which people wrote
    turns/loogle        the questions of `many/loogle`, which people wrote

`settings.cases` is the number of texts. A case's tag `turn` counts from 1; `again` is true for a repeated question.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator

from . import TASKS, Case, TaskSettings

NEW = 8  # number of different questions about a text
AGAIN = (5, 10)  # turns that repeat an earlier question
# {turn: (a question for several facts, the kinds of many.py that answer it)}
BROAD = {
    3: ("List every ship in the text with its captain, cook or builder, and with all dates.", ("names", "dates")),
    6: ("List all passwords, signs, nicknames, numbers and costs of buildings in the text.", ("words", "digits")),
    9: ("List all tradesmen in the text with villages, cellars, hooks or lockers.", ("places", "keys")),
}
ROOM = 24  # tokens that an answer may have beyond the right one's: without an opening it is a sentence


def turns(settings: TaskSettings, other: str, task: str, mixed: bool = False) -> Iterator[Case]:
    """Yield the questions about each text of the task `other` as turns of a conversation, with the questions of `BROAD`
    if `mixed`. Texts with fewer than `NEW` questions are left out. Raises ValueError if no text is left."""
    few = True
    for text, group in itertools.groupby(TASKS.find(other)(settings), lambda case: case.context):
        cases = list(group)
        if len(cases) < NEW:
            continue
        few, rng = False, settings.rng(task, settings.length, cases[0].id)
        new, asked = rng.sample(cases, NEW), list[Case]()
        for turn in range(1, NEW + len(AGAIN) + 1):
            again = turn in AGAIN
            if again:
                case = rng.choice(asked)
            elif mixed:
                case = broad(settings, cases, turn) if turn in BROAD else narrow(new.pop())
            else:
                case = new.pop()
            asked.append(case)
            question = case.question.strip().removeprefix("Question: ").partition("\nAnswer:")[0]
            yield dataclasses.replace(
                case, task=task, id=f"{task}/{case.id}/{turn}", context=text, question=f"\n\n{question}", opening="",
                new_tokens=case.new_tokens + ROOM, tags=case.tags | dict(turn=turn, again=again),
                one_line=case.one_line, likelihood=False, turn=turn,
            )  # fmt: skip
    if few:
        raise ValueError(f"--lengths {settings.length}: no text of {task} has {NEW} questions then; give more tokens")


def narrow(case: Case) -> Case:
    return dataclasses.replace(
        case, answers=case.answers[:1], metric="contains_all", tags=case.tags | dict(asks="narrow")
    )


def broad(settings: TaskSettings, cases: list[Case], turn: int) -> Case:
    """Make the question of `BROAD` for a turn about the text of `cases`."""
    question, kinds = BROAD[turn]
    answers = tuple(case.answers[0] for case in cases if case.tags["kind"] in kinds)
    new = settings.room(answers, every=True) + ROOM * (len(answers) - 1)
    return dataclasses.replace(
        cases[0], question=question, answers=answers, metric="contains_all", new_tokens=new, one_line=False,
        tags=dict(length=settings.length, text=cases[0].tags["text"], asks="broad"),
    )  # fmt: skip


for _name in ("", "/paraphrased", "/xquad", "/loogle"):
    TASKS.add(f"turns{_name}")(functools.partial(turns, other=f"many{_name}", task=f"turns{_name}"))
TASKS.add("turns/mixed")(functools.partial(turns, other="many", task="turns/mixed", mixed=True))
