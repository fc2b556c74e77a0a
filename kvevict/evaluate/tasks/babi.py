"""bAbI's 20 tasks (arXiv 1502.05698) with the story's facts hidden in long text (BABILong, arXiv 2406.10149):
`babi/qa1` .. `babi/qa20`. The facts keep their order; their places are random. Two short stories of the training set
come first, to show what answers look like.

`settings.data` is a folder with `qa<n>_<name>_train.txt` and `.._test.txt`, or one that has these in `en`.
"""

import functools
import re
from pathlib import Path

from ..data import drawn, files
from ..haystack import haystack
from ..metrics import labels
from . import TASKS, Case, opening

NEW_TOKENS = 20


@functools.lru_cache(maxsize=20)
def stories(path: Path) -> list[tuple[tuple[str, ...], str, str]]:
    """(facts so far, question, answer) of every question of a bAbI file."""
    found, facts = [], []
    for row in path.read_text("utf-8").splitlines():
        number, _, text = row.partition(" ")
        if number == "1":
            facts = []
        question, *answer = re.split(r"[\t|]", text)  # some copies of qa1 have | for the tabs
        if answer:
            found.append((tuple(facts), question.strip(), answer[0].strip()))
        else:
            facts.append(text.strip())
    return found


def cases(number: int, settings):
    """A story's facts in text of `length` tokens, and its question."""
    name, read = f"babi/qa{number}", {}
    for part in ("train", "test"):
        pattern = f"qa{number}_*_{part}.txt"
        read[part] = stories(files(settings, name, "tasks_1-20 of bAbI", pattern, f"en/{pattern}")[0])
    every = sorted({label for _, _, answer in read["test"] for label in labels(answer)})
    for i, (place, (facts, asked, answer)) in enumerate(drawn(settings, name, read["test"])):
        rng, question = settings.rng(name, i), asks(asked)
        intro = examples(rng.sample(read["train"], min(20, len(read["train"]))))
        hidden = dict(zip(sorted(rng.random() for _ in facts), facts))
        text = haystack(settings).passage(rng, settings.length, settings, hidden, before=intro, after=question)
        wrong = (label for label in every if label not in labels(answer) and label.lower() not in asked.lower())
        id, tags = f"{name}/{settings.length}/{place}", {"length": settings.length, "facts": len(facts)}
        how = NEW_TOKENS, tags, opening(question), True
        yield Case(name, id, intro + text, question, (answer, *wrong), "only_label", *how)


def asks(question: str) -> str:
    return f"\n\nQuestion: {question}\nAnswer:"


def examples(drawn: list) -> str:
    """The two shortest of some stories, and what comes after them."""
    shortest = sorted(drawn, key=lambda story: len(story[0]))[:2]
    shown = "".join(f"{' '.join(facts)}{asks(question)} {answer}\n\n" for facts, question, answer in shortest)
    return f"{shown}Another story, which has nothing to do with these, is hidden in the following text.\n\n"


for _number in range(1, 21):
    TASKS.add(f"babi/qa{_number}")(functools.partial(cases, _number))
