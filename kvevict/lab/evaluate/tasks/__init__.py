"""Defines tasks, which yield the questions of an evaluation. The file of each family of tasks registers functions

    task(settings) -> iterator of `settings.cases` `Case`s per length (and depth, if the task has depths)

Case i depends only on the settings, the task's name and i (`settings.rng(name, i)`), so that an
interrupted evaluation resumes with equal cases.
"""

import dataclasses
import functools
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ....asking.prompts import ids_of
from ....policy.registry import Registry, load_folder

TASKS = Registry("task", listed=True)
FIDELITY = "fidelity"  # name of a task and of its metric
PERPLEXITY = "perplexity"  # the metric of cases scored by the mean negative log likelihood of answers[0], in nats
RESPONSE = 64  # most tokens of the full cache's response in a fidelity case, if the task's answers are not longer
MARGIN = 8  # tokens that an answer may have beyond the right answer's


@dataclass(frozen=True)
class Case:
    """One question. The prompt is `context + question`; a run of mode `later` evicts from `context` alone."""

    task: str
    id: str  # unique and stable within an evaluation, e.g. "needle/1024/0.5/3"
    context: str
    question: str  # begins with a newline or space, ends where the answer starts
    answers: tuple[str, ...]  # accepted answers; for the metric contains_all, all wanted parts
    metric: str  # a name in `kvevict.lab.evaluate.metrics.METRICS`, FIDELITY or PERPLEXITY
    new_tokens: int  # most tokens to generate
    tags: dict = field(default_factory=dict)  # for grouping tables: length, depth, facts, ...
    opening: str = ""  # the end of `question` that opens the answer: a chat template gives it to the assistant
    one_line: bool = False  # whether the answer ends with its first line
    system: str = ""  # the system prompt, before the context
    said: str = ""  # the question alone, if the prompt has other words around it; else ""
    likelihood: bool = False  # whether the likelihood of answers[0] after the question is measured too
    classes: tuple[str, ...] = ()  # all classes of a classification task, which its metric needs
    turn: int = 0  # number of the case's turn in a conversation about the context, from 1; 0: no conversation


@dataclass(frozen=True)
class TaskSettings:
    """The settings that a task builds its cases from."""

    tokenizer: Any  # measures the lengths of texts
    length: int  # most tokens of context + question (in RULER's tasks also + answer)
    cases: int  # number of cases per length, and per depth if the task has depths
    seed: int = 0
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    haystack: Path | None = None  # a .txt, a folder of them, a .jsonl or .jsonl.xz (field "text"); None: generated text
    data: Path | None = None  # folder of a downloaded benchmark, for the tasks that need one

    def rng(self, *names: object) -> random.Random:
        return random.Random("/".join(map(str, (self.seed, *names))))

    def tokens(self, text: str) -> int:
        return len(ids_of(self.tokenizer, text))

    def room(self, answers: Iterable[str], every: bool = False) -> int:
        """Return the number of tokens to generate: enough for the longest of the answers or, if `every`, for all of
        them."""
        sizes = [self.tokens(f" {answer}") + MARGIN for answer in answers]
        return sum(sizes) if every else max(sizes)


def find(name: str) -> Callable[[TaskSettings], Iterator[Case]]:
    """Return a task's function by the task's name. "fidelity/NAME" measures fidelity on the prompts of the task
    NAME."""
    prefix, slash, other = name.partition("/")
    if prefix == FIDELITY and slash:
        return functools.partial(only_prompts, TASKS.find(other))
    return TASKS.find(name)


def only_prompts(task: Callable[[TaskSettings], Iterator[Case]], settings: TaskSettings) -> Iterator[Case]:
    """Yield a task's cases as fidelity cases: the full cache's response takes the place of the answers."""
    for case in task(settings):
        yield dataclasses.replace(
            case, task=f"{FIDELITY}/{case.task}", id=f"{FIDELITY}/{case.id}", metric=FIDELITY, answers=(),
            new_tokens=max(RESPONSE, case.new_tokens), one_line=False,
        )  # fmt: skip


def opening(question: str, mark: str = "Answer:") -> str:
    """Return the end of the question from the last `mark` on, which opens the answer (for example "Answer:")."""
    return question[question.rindex(mark) :]


load_folder(__name__)
