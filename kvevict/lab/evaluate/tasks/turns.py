"""Tasks of conversations: ten turns about one text, each after the model's own answers (evaluate/turns.py). Eight turns
ask questions of a task of many.py, without the answers' openings. Turns 5 and 10 repeat an earlier question.

    turns               twelve facts of six kinds in other text, at even depths
    turns/paraphrased   the facts of `turns`, asked for in other words than the text's
    turns/xquad         questions of people, as in `many/xquad`
    turns/loogle        questions of people, as in `many/loogle`

`settings.cases` counts texts. A case's tag `turn` counts from 1; its tag `again` is true for a repeated question.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator

from . import TASKS, Case, TaskSettings

NEW = 8  # different questions of a text
AGAIN = (5, 10)  # turns that repeat an earlier question
ROOM = 24  # tokens of an answer beyond those of the right one: without an opening it is a sentence


def turns(settings: TaskSettings, other: str, task: str) -> Iterator[Case]:
    """Yield the questions about each text of the task `other` as turns. Texts with fewer than `NEW` questions are left
    out. Raises ValueError if that leaves none."""
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
