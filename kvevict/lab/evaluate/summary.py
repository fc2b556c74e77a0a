"""Averages results per policy and task, with 95 % intervals and the share of the full cache's score. An average as
text, by `str`, is its cell in a table."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .intervals import Z, clustered, of_scores, standard_error, student
from .results import Line
from .runs import FULL, MODES
from .tasks import FIDELITY, PERPLEXITY

FEW = 5  # fewest cases whose interval is shown: with fewer it is nearly everything, or all that equal cases leave
NOT_IN_PERCENT = (PERPLEXITY, FIDELITY)


@dataclass(frozen=True)
class ScoreCell:
    """The mean score of cases, in [0, 1], or their perplexity, with its 95 % interval from `low` to `high`."""

    mean: float
    low: float
    high: float
    share: float | None  # mean / full run's mean (perplexity: inverse); None without a full run or if its mean is 0
    cases: int
    metric: str
    # perplexity: mean over cases of the nats a token above the full run's, and half of its paired 95 % interval
    gap: tuple[float, float] | None = None

    def __str__(self) -> str:
        if self.metric == PERPLEXITY:
            shown = f"{self.mean:.2f} {_interval(self.low, self.high, self.cases, 2)}"
            return shown if self.gap is None else f"{shown}; {self.gap[0]:+.3f} {_half(self.gap[1], self.cases)}"
        interval = _interval(100 * self.low, 100 * self.high, self.cases)
        return f"{100 * self.mean:.1f} {interval}{_percent(self.share)}"


@dataclass(frozen=True)
class FidelityCell:
    """Mean differences from the full cache on the same cases, with standard errors."""

    mean: float  # the KL divergence in nats
    low: float
    high: float
    error: float
    same: float  # the share of tokens for which both have the same likeliest token
    same_error: float
    metric: str = FIDELITY

    def __str__(self) -> str:
        return f"{self.mean:.3f} ±{self.error:.3f} {100 * self.same:.1f} ±{100 * self.same_error:.1f}%"


@dataclass(frozen=True)
class QuestionsCell:
    """Averages over questions for which the likelihood of the right answer is known."""

    mean: float  # mean score of the `counted` questions, with its interval from `low` to `high`
    low: float
    high: float
    counted: int  # number of questions that the full cache answers, with a score of at least 1/2
    cases: int  # number of all questions
    dnll: float  # mean over all questions of the right answer's nats per token, minus the full cache's
    half: float  # half the width of dnll's 95 % interval, where questions about one text may be correlated
    metric: str
    texts: int  # number of texts that the questions are about

    def __str__(self) -> str:
        interval = _interval(100 * self.low, 100 * self.high, self.counted)
        right = f"{100 * self.mean:.1f} {interval} of {self.counted}/{self.cases}"
        return f"{right}; {self.dnll:+.3f} {_half(self.half, self.texts)}"


@dataclass(frozen=True)
class Average:
    """The mean of several tasks' scores, with equal weights, and the mean's share of the full cache's mean."""

    mean: float
    share: float | None

    def __str__(self) -> str:
        return f"{100 * self.mean:.1f}{_percent(self.share)}"


Cell = ScoreCell | FidelityCell | QuestionsCell
Row = tuple[str, Any, int | None]  # (policy, budget, chunk size)
Column = tuple[str, tuple, str]  # (task, values of tags, mode)
Summary = dict[Row, dict[Column, Cell]]


def summarize(lines: list[Line], by: Sequence[str] = ()) -> Summary:
    """Average results by row and by column, which includes the values of the tags `by`; rows and columns are in the
    results' order.

    Cases and seeds are pooled. The full run does not depend on the mode and appears under every mode. Cases that lack
    one of the tags are left out.
    """
    lines = [line for line in lines if all(tag in line["tags"] for tag in by)]
    modes = [mode for mode in MODES if any(line["mode"] == mode for line in lines)] or MODES[:1]
    full = {_case(line): line for line in lines if line["policy"] == FULL.policy}
    groups: dict[Row, dict[Column, list[Line]]] = {}
    for line in lines:
        row = line["policy"], line["budget"], line["chunk_size"]
        for mode in modes if line["mode"] is None else [line["mode"]]:
            column = line["task"], tuple(line["tags"][tag] for tag in by), mode
            groups.setdefault(row, {}).setdefault(column, []).append(line)
    return {row: {column: _cell(group, full) for column, group in columns.items()} for row, columns in groups.items()}


def averages(summary: Summary, mode: str) -> dict[Row, Average]:
    """Return {row: `Average` over the tasks of a mode} for each row of a `summary` (made without tags) that has every
    task. Only tasks with scores in per cent count. Returns {} if there are fewer than two tasks."""
    own = {row: {c: cell for c, cell in cells.items() if c[2] == mode} for row, cells in summary.items()}
    columns = {c for cells in own.values() for c, cell in cells.items() if cell.metric not in NOT_IN_PERCENT}
    complete = [row for row, cells in own.items() if columns <= cells.keys()] if len(columns) > 1 else []
    means = {row: sum(own[row][c].mean for c in columns) / len(columns) for row in complete}
    full = means.get((FULL.policy, None, None))
    return {row: Average(mean, mean / full if full else None) for row, mean in means.items()}


def _cell(lines: list[Line], full: dict[tuple, Line]) -> Cell:
    """Average the lines of one cell, in the way of their metric. `full` maps a case to the line of its full run."""
    metric, *others = dict.fromkeys(line["metric"] for line in lines)
    if others:
        raise ValueError(f"lines of {lines[0]['task']} are of several metrics, {metric} and {', '.join(others)}")
    scores, pairs = (
        [line["score"] for line in lines],
        [(line, full[_case(line)]) for line in lines if _case(line) in full],
    )
    mean, error = sum(scores) / len(scores), standard_error(scores)
    if metric == FIDELITY:
        same = [line["same"] for line in lines]
        low, high = max(0.0, mean - Z * error), mean + Z * error
        return FidelityCell(mean, low, high, error, sum(same) / len(same), standard_error(same))
    if all("nats" in line for line in lines):
        return _questions(pairs, metric)
    base = sum(other["score"] for _, other in pairs) / len(pairs) if pairs else 0.0
    if metric == PERPLEXITY:  # scores are mean negative log likelihoods
        low, high, share = _exp(mean - Z * error), _exp(mean + Z * error), _exp(base - mean) if pairs else None
        above = [line["score"] - other["score"] for line, other in pairs]
        gap = (sum(above) / len(above), student(above)) if above and lines[0]["policy"] != FULL.policy else None
        return ScoreCell(_exp(mean), low, high, share, len(scores), metric, gap)
    mean, low, high = of_scores(scores)
    return ScoreCell(mean, low, high, mean / base if base else None, len(scores), metric)


def _questions(pairs: list[tuple[Line, Line]], metric: str) -> QuestionsCell:
    """Average questions; `pairs` has (a question's line, the line of the question's full run)."""
    scores = [line["score"] for line, base in pairs if base["score"] >= 0.5]
    dnll = [line["nats"] - base["nats"] for line, base in pairs] or [math.nan]
    texts: list = [_text(line) for line, _ in pairs] or [None]
    middle = of_scores(scores) if scores else (0.0, 0.0, 1.0)
    return QuestionsCell(
        *middle, len(scores), len(pairs), sum(dnll) / len(dnll), clustered(dnll, texts), metric, len(set(texts))
    )


def _text(line: Line) -> tuple:
    """Return a key for the text that a line's question is about: questions about one text may be correlated."""
    return line["task"], line["seed"], line["tags"].get("length"), line["tags"].get("text", line["id"])


def _case(line: Line) -> tuple:
    return line["task"], line["id"], line["seed"]


def _exp(x: float) -> float:
    return math.inf if x > 709 else math.exp(x)


def _interval(low: float, high: float, cases: int, digits: int = 0) -> str:
    return "[few]" if cases < FEW else f"[{low:.{digits}f}, {high:.{digits}f}]"


def _half(half: float, cases: int) -> str:
    return "[few]" if cases < FEW else f"±{half:.3f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f" {share:.0%}"
