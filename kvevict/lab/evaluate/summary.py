"""Averages results per policy and task, with 95 % intervals and the share of the full cache's score."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .intervals import Z, clustered, of_scores, standard_error
from .results import Line
from .runs import FULL, MODES
from .tasks import FIDELITY, PERPLEXITY

NOT_IN_PERCENT = (PERPLEXITY, FIDELITY)


@dataclass(frozen=True)
class Cell:
    """The mean score of cases, in [0, 1], or their perplexity, with its interval."""

    mean: float
    low: float
    high: float
    share: float | None  # the score over the full run's (a perplexity: the full run's over this); None if that is 0
    cases: int
    metric: str

    def __str__(self) -> str:
        share = "" if self.share is None else f" {self.share:.0%}"
        if self.metric == PERPLEXITY:
            return f"{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]{share}"
        return f"{100 * self.mean:.1f} [{100 * self.low:.0f}, {100 * self.high:.0f}]{share}"


@dataclass(frozen=True)
class Fidelity:
    """Mean differences from the full cache on the same cases, with their standard errors."""

    mean: float  # the KL divergence in nats
    error: float
    same: float  # the share of equal first choices
    same_error: float
    cases: int
    metric: str = FIDELITY

    @property
    def low(self) -> float:
        return max(0.0, self.mean - Z * self.error)

    @property
    def high(self) -> float:
        return self.mean + Z * self.error

    def __str__(self) -> str:
        return f"{self.mean:.3f} ±{self.error:.3f} {100 * self.same:.1f} ±{100 * self.same_error:.1f}%"


def fidelity(lines: list[Line]) -> Fidelity:
    def of(name: str) -> tuple:
        values = [line[name] for line in lines]
        return sum(values) / len(values), standard_error(values)

    return Fidelity(*of("score"), *of("same"), len(lines))  # type: ignore[call-arg]


@dataclass(frozen=True)
class QuestionsCell:
    """Numbers of questions with a known likelihood of the right answer."""

    mean: float  # the score of the `counted` questions, with its interval
    low: float
    high: float
    counted: int  # questions that the full cache answers, with a score of at least 1/2
    cases: int  # all questions
    dnll: float  # over all questions, the nats per token of the right answer above the full cache's
    half: float  # half the width of its paired interval; a text's questions may be correlated
    metric: str

    def __str__(self) -> str:
        right = f"{100 * self.mean:.1f} [{100 * self.low:.0f}, {100 * self.high:.0f}] of {self.counted}/{self.cases}"
        return f"{right}; {self.dnll:+.3f} ±{self.half:.3f}"


def questions_cell(lines: list[Line], full: dict[tuple, Line]) -> QuestionsCell:
    """Make the `QuestionsCell` of the lines whose case is in `full`, {case: the full run's line}."""
    pairs = [(line, full[_case(line)]) for line in lines if _case(line) in full]
    scores = [line["score"] for line, base in pairs if base["score"] >= 0.5]
    dnll = [line["nats"] - base["nats"] for line, base in pairs] or [math.nan]
    texts: list = [_text(line) for line, _ in pairs] or [None]
    middle = of_scores(scores) if scores else (0.0, 0.0, 1.0)
    mean = sum(dnll) / len(dnll)
    half, metric = clustered(dnll, texts), lines[0]["metric"]
    return QuestionsCell(*middle, counted=len(scores), cases=len(pairs), dnll=mean, half=half, metric=metric)


def _text(line: dict) -> tuple:
    """Identify the text of a line: questions of one text depend on each other."""
    return line["task"], line["seed"], line["tags"].get("length"), line["tags"].get("text", line["id"])


@dataclass(frozen=True)
class Average:
    """The mean of tasks' scores, with equal weights, and its share of the full cache's."""

    mean: float
    share: float | None

    def __str__(self) -> str:
        return f"{100 * self.mean:.1f}" + ("" if self.share is None else f" {self.share:.0%}")


def averages(summary: dict[tuple, dict[tuple, Any]], mode: str) -> dict[tuple, Average]:
    """Return {row: `Average` over its tasks in per cent} for the rows of a `summary` without tags that have every task;
    {} if there are fewer than two tasks."""
    own = {row: {c: cell for c, cell in cells.items() if c[2] == mode} for row, cells in summary.items()}
    columns = {c for cells in own.values() for c, cell in cells.items() if cell.metric not in NOT_IN_PERCENT}
    complete = [row for row, cells in own.items() if columns <= cells.keys()] if len(columns) > 1 else []
    means = {row: sum(own[row][c].mean for c in columns) / len(columns) for row in complete}
    full = means.get((FULL.policy, None, None))
    return {row: Average(mean, mean / full if full else None) for row, mean in means.items()}


def _exp(x: float) -> float:
    return math.inf if x > 709 else math.exp(x)


def cell(scores: Sequence[float], full: Sequence[float], metric: str) -> Cell:
    """Make the cell of scores; `full` has the full run's scores of the same cases. Scores of the metric perplexity are
    mean negative log likelihoods."""
    base = sum(full) / len(full) if full else 0.0
    if metric == PERPLEXITY:
        mean = sum(scores) / len(scores)
        half = Z * standard_error(scores)
        share = _exp(base - mean) if full else None
        return Cell(_exp(mean), _exp(mean - half), _exp(mean + half), share, len(scores), metric)
    mean, low, high = of_scores(scores)
    return Cell(mean, low, high, mean / base if base else None, len(scores), metric)


def summarize(lines: list[Line], by: Sequence[str] = ()) -> dict[tuple, dict[tuple, Any]]:
    """Return {(policy, budget, chunk_size): {(task, values of the tags `by`, mode): Cell}}, in the results' order.

    Cases and seeds are pooled. The full run does not depend on the mode and stands under every one. Cases that lack one
    of the tags are left out.
    """
    lines = [line for line in lines if all(tag in line["tags"] for tag in by)]
    modes = [mode for mode in MODES if any(line["mode"] == mode for line in lines)] or MODES[:1]
    full = {_case(line): line for line in lines if line["policy"] == FULL.policy}
    groups = {}
    for line in lines:
        row = line["policy"], line["budget"], line["chunk_size"]
        for mode in modes if line["mode"] is None else [line["mode"]]:
            column = line["task"], tuple(line["tags"][tag] for tag in by), mode
            groups.setdefault(row, {}).setdefault(column, []).append(line)
    return {row: {column: _of(group, full) for column, group in columns.items()} for row, columns in groups.items()}


def _of(group: list, full: dict) -> Any:
    """Make the cell of a group's lines; `full` is {case: the full cache's line}."""
    metric, *others = dict.fromkeys(line["metric"] for line in group)
    if others:
        raise ValueError(f"lines of {group[0]['task']} are of several metrics, {metric} and {', '.join(others)}")
    if metric == FIDELITY:
        return fidelity(group)
    if all("nats" in line for line in group):
        return questions_cell(group, full)
    base = [full[_case(line)]["score"] for line in group if _case(line) in full]
    return cell([line["score"] for line in group], base, metric)


def _case(line: dict) -> tuple:
    return line["task"], line["id"], line["seed"]
