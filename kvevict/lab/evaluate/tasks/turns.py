"""Tasks of conversations: ten turns about one text, each after the model's own earlier answers (evaluate/turns.py).
Eight turns ask questions of a task of many.py, without the answers' openings; turns 5 and 10 repeat earlier questions.

    turns               twelve facts of six kinds in other text, at even depths
    turns/paraphrased   the facts of `turns`; the questions use other words than the text
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
ROOM = 24  # tokens that an answer may have beyond the right one's: without an opening it is a sentence


def turns(settings: TaskSettings, other: str, task: str) -> Iterator[Case]:
    """Yield the questions about each text of the task `other` as turns of a conversation. Texts with fewer than `NEW`
    questions are left out. Raises ValueError if no text is left."""
    few = True
    for text, group in itertools.groupby(TASKS.find(other)(settings), lambda case: case.context):
        cases = list(group)
        if len(cases) < NEW:
            continue
        few, rng = False, settings.rng(task, settings.length, cases[0].id)
        new, asked = rng.sample(cases, NEW), list[Case]()
        for turn in range(1, NEW + len(AGAIN) + 1):
            again = turn in AGAIN
            case = rng.choice(asked) if again else new.pop()
            asked.append(case)
            question = case.question.strip().removeprefix("Question: ").partition("\nAnswer:")[0]
            yield dataclasses.replace(
                case, task=task, id=f"{task}/{case.id}/{turn}", context=text, question=f"\n\n{question}", opening="",
                new_tokens=case.new_tokens + ROOM, tags=case.tags | dict(turn=turn, again=again), one_line=True,
                likelihood=False, turn=turn,
            )  # fmt: skip
    if few:
        raise ValueError(f"--lengths {settings.length}: no text of {task} has {NEW} questions then; give more tokens")


for _name in ("", "/paraphrased", "/xquad", "/loogle"):
    TASKS.add(f"turns{_name}")(functools.partial(turns, other=f"many{_name}", task=f"turns{_name}"))
