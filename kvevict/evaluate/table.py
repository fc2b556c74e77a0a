"""What results say: means with 95 % intervals, per policy and task, and the share of the full cache's score."""

import math
from dataclasses import dataclass

from ..commands import grid
from .ask import FULL, MODES, PERPLEXITY

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


def cell(scores, full, metric) -> Cell:
    """scores and the full run's scores of the same cases; for perplexity both are mean negative log likelihoods."""
    base = sum(full) / len(full) if full else 0.0
    if metric == PERPLEXITY:
        mean = sum(scores) / len(scores)
        half = _half(scores, mean)
        share = math.exp(base - mean) if full else None
        return Cell(math.exp(mean), math.exp(mean - half), math.exp(mean + half), share, len(scores), metric)
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
    return {
        row: {
            column: cell(
                [line["score"] for line in group], [full[_case(line)] for line in group if _case(line) in full],
                group[0]["metric"],
            )
            for column, group in columns.items()
        }
        for row, columns in groups.items()
    }  # fmt: skip


def _case(line) -> tuple:
    return line["task"], line["id"], line["seed"]


def render(lines, by=(), markdown=False) -> str:
    """A table with a column per task and mode; with tags `by`, a table per task and mode with a column per value."""
    if not lines:
        return "no results yet"
    summary = summarize(lines, by)
    columns = list(dict.fromkeys(column for row in summary.values() for column in row))
    parts = [CAPTION]
    if not by:
        heads = {f"{task}, {mode}": (task, (), mode) for task, _, mode in columns}
        parts.append(_grid(_cells(summary, heads), markdown))
        columns = []
    for task, mode in dict.fromkeys((task, mode) for task, _, mode in columns):
        values = sorted(value for other, value, its in columns if (other, its) == (task, mode))
        heads = {" ".join(map(str, value)): (task, value, mode) for value in values}
        parts += [f"{task}, {mode}, by {' and '.join(by)}", _grid(_cells(summary, heads), markdown)]
    return "\n\n".join(parts)


CAPTION = (
    "Score in % (perplexity as such), its 95 % interval, and its share of the full cache's. aware: the question is\n"
    "known while the prompt is read; agnostic: it comes after the context was compressed."
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


def _grid(table, markdown) -> str:
    if not markdown:
        return grid(table, left=len(table[0]))
    widths = [max(map(len, column)) for column in zip(*table)]
    rows = [[text.ljust(width) for text, width in zip(row, widths)] for row in table]
    rows.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
