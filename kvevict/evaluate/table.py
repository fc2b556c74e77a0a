"""What results say: means with 95 % intervals, per policy and task, and the share of the full cache's score."""

import math
from dataclasses import dataclass

from ..commands import grid
from .ask import FULL, MODES, PERPLEXITY
from .tasks import FIDELITY

NOT_IN_PERCENT = (PERPLEXITY, FIDELITY)
Z = 1.96  # two-sided 95 % of a normal distribution


@dataclass(frozen=True)
class Cell:
    """Scores in [0, 1], or perplexities. share: score over the full run's on the same cases (perplexity: the full run's
    over this one); None when the full run scores 0."""

    mean: float
    low: float
    high: float
    share: float | None
    cases: int
    metric: str

    def __str__(self):
        share = "" if self.share is None else f" {self.share:.0%}"
        if self.metric == PERPLEXITY:
            return f"{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]{share}"
        return f"{100 * self.mean:.1f} [{100 * self.low:.0f}, {100 * self.high:.0f}]{share}"


@dataclass(frozen=True)
class Fidelity:
    """Means over cases, of differences from the full cache on the same case, and the means' standard errors: the KL
    divergence in nats and the share of equal first choices."""

    mean: float
    error: float
    same: float
    same_error: float
    cases: int
    metric: str = FIDELITY

    @property
    def low(self):
        return max(0.0, self.mean - Z * self.error)

    @property
    def high(self):
        return self.mean + Z * self.error

    def __str__(self):
        return f"{self.mean:.3f} ±{self.error:.3f} {100 * self.same:.1f} ±{100 * self.same_error:.1f}%"


def fidelity(lines) -> Fidelity:
    def of(name):
        values = [line[name] for line in lines]
        mean = sum(values) / len(values)
        return mean, _half(values, mean) / Z

    return Fidelity(*of("score"), *of("same"), len(lines))  # type: ignore[call-arg]


@dataclass(frozen=True)
class Average:
    """The mean of tasks' scores, each of the same weight, and its share of the full cache's."""

    mean: float
    share: float | None

    def __str__(self):
        return f"{100 * self.mean:.1f}" + ("" if self.share is None else f" {self.share:.0%}")


def averages(summary, mode) -> dict:
    """{row of a `summary` without tags: `Average` over all its tasks in per cent}; only of rows that have all of them,
    and none of fewer than two tasks."""
    own = {row: {c: cell for c, cell in cells.items() if c[2] == mode} for row, cells in summary.items()}
    columns = {c for cells in own.values() for c, cell in cells.items() if cell.metric not in NOT_IN_PERCENT}
    whole = [row for row, cells in own.items() if columns <= cells.keys()] if len(columns) > 1 else []
    means = {row: sum(own[row][c].mean for c in columns) / len(columns) for row in whole}
    full = means.get((FULL.policy, None, None))
    return {row: Average(mean, mean / full if full else None) for row, mean in means.items()}


def interval(scores) -> tuple:
    """(mean, low, high) of scores in [0, 1], 95 %: Wilson's interval when all are 0 or 1, else a normal one, which is
    as wide as [0, 1] for a single score."""
    n, mean = len(scores), sum(scores) / len(scores)
    if all(score in (0, 1) for score in scores):
        centre = (mean + Z * Z / (2 * n)) / (1 + Z * Z / n)
        half = Z / (1 + Z * Z / n) * math.sqrt(mean * (1 - mean) / n + Z * Z / (4 * n * n))
        return mean, max(0.0, centre - half), min(1.0, centre + half)
    half = _half(scores, mean)
    return mean, max(0.0, mean - half), min(1.0, mean + half)


def _half(scores, mean) -> float:
    n = len(scores)
    return math.inf if n < 2 else Z * math.sqrt(sum((x - mean) ** 2 for x in scores) / (n - 1) / n)


def _exp(x: float) -> float:
    return math.inf if x > 709 else math.exp(x)


def cell(scores, full, metric) -> Cell:
    """scores and the full run's scores of the same cases; for perplexity both are mean negative log likelihoods."""
    base = sum(full) / len(full) if full else 0.0
    if metric == PERPLEXITY:
        mean = sum(scores) / len(scores)
        half = _half(scores, mean)
        share = _exp(base - mean) if full else None
        return Cell(_exp(mean), _exp(mean - half), _exp(mean + half), share, len(scores), metric)
    mean, low, high = interval(scores)
    return Cell(mean, low, high, mean / base if base else None, len(scores), metric)


def summarize(lines, by=()) -> dict:
    """{(policy, budget, chunk_size): {(task, values of the tags `by`, mode): Cell}}, both in the results' order.

    Cases and seeds are pooled. The full run does not depend on the mode and stands under every one. Cases without one
    of the tags are left out.
    """
    lines = [line for line in lines if all(tag in line["tags"] for tag in by)]
    modes = [mode for mode in MODES if any(line["mode"] == mode for line in lines)] or MODES[:1]
    full = {_case(line): line["score"] for line in lines if line["policy"] == FULL.policy}
    groups = {}
    for line in lines:
        row = line["policy"], line["budget"], line["chunk_size"]
        for mode in modes if line["mode"] is None else [line["mode"]]:
            column = line["task"], tuple(line["tags"][tag] for tag in by), mode
            groups.setdefault(row, {}).setdefault(column, []).append(line)
    return {row: {column: _of(group, full) for column, group in columns.items()} for row, columns in groups.items()}


def _of(group, full):
    """The cell of a group's lines; full: case -> score of the full cache."""
    metric, *others = dict.fromkeys(line["metric"] for line in group)
    if others:
        raise ValueError(f"lines of {group[0]['task']} are of several metrics, {metric} and {', '.join(others)}")
    if metric == FIDELITY:
        return fidelity(group)
    return cell([line["score"] for line in group], [full[_case(x)] for x in group if _case(x) in full], metric)


def _case(line) -> tuple:
    return line["task"], line["id"], line["seed"]


def render(lines, by=(), markdown=False) -> str:
    """A table with a column per task and mode, and of several tasks their average first; with tags `by`, a table per
    task and mode with a column per value."""
    if not lines:
        return "no results yet"
    summary = summarize(lines, by)
    columns = list(dict.fromkeys(column for row in summary.values() for column in row))
    parts = [CAPTION + (NEAR if any(line["metric"] == FIDELITY for line in lines) else "")]
    if not by:
        heads = {f"{task}, {mode}": (task, (), mode) for task, _, mode in columns}
        for mode in dict.fromkeys(mode for *_, mode in columns):
            if means := averages(summary, mode):
                heads = {f"average, {mode}": (None, (), mode)} | heads
                summary = {row: cells | {(None, (), mode): means.get(row, "")} for row, cells in summary.items()}
        parts.append(drawn(_cells(summary, heads), markdown))
        columns = []
    for task, mode in dict.fromkeys((task, mode) for task, _, mode in columns):
        values = sorted((value for other, value, its in columns if (other, its) == (task, mode)), key=_place)
        heads = {" ".join(map(str, value)): (task, value, mode) for value in values}
        parts += [f"{task}, {mode}, by {' and '.join(by)}", drawn(_cells(summary, heads), markdown)]
    return "\n\n".join(parts)


def _place(value):
    """Sorts values of tags, of which some may be words and some numbers."""
    return [(isinstance(each, str), each) for each in value]


CAPTION = (
    "Score in % (perplexity as such), its 95 % interval, and its share of the full cache's. aware: the question is\n"
    "known while the prompt is read; agnostic: it comes after the context was compressed."
)
NEAR = (
    "\nfidelity: mean KL divergence from the full cache's next-token distributions in nats, and the share of equal\n"
    "first choices, each with its standard error over cases, which are compared with the full cache one by one."
)


def _cells(summary, columns: dict) -> list:
    """Rows of text, the head first. columns: head -> key of the cell."""
    table = [["policy", "budget", "chunk", *columns]]
    for (policy, budget, chunk), row in summary.items():
        cells = [str(row[key]) if key in row else "" for key in columns.values()]
        if any(cells):
            setting = ["", ""] if budget is None else [str(budget), str(chunk or "whole")]
            table.append([policy, *setting, *cells])
    return table


def drawn(table, markdown: bool) -> str:
    """Rows of texts, the head first, as columns or in Markdown."""
    if not markdown:
        return grid(table, left=len(table[0]))
    widths = [max(map(len, column)) for column in zip(*table)]
    rows = [[text.ljust(width) for text, width in zip(row, widths)] for row in table]
    rows.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
