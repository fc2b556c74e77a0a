"""Tables and figures of papers as data, for `kvevict papers NAME`: what their cells are, and the numbers that the paper
has in them. A file of this folder that is named as a paper has that paper's tables. measures.py and scores.py fill
cells, run.py runs tables, write.py writes them."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypedDict

from ...policy.registry import Registry, load_folder

PAPERS = Registry("paper", listed=True)
NUMBER = r"[-+]?\d[\d.]*(e[-+]?\d+)?"


class Setting(TypedDict, total=False):
    """A part of what a cell is: its row's, its column's, or what all cells of a table share.

    policy    NAME or NAME:OPTION=VALUE,... with the words in braces of `protocols.words`, or "full"
    budget    slots per kv head, or a share of the prompt's tokens
    chunk     tokens read at once; without it the prompt is read in one pass
    tasks     a name for `scores.tasks_of`
    task      one of these tasks; without it all
    length    tokens of a prompt; without it all lengths of a run of the command
    batch     prompts that are read together
    new       tokens to decode
    temperature  sampling temperature; without it the likeliest token is taken
    """

    policy: str
    budget: int | float
    chunk: int
    tasks: str
    task: str
    length: int
    batch: int
    new: int
    temperature: float


Settings = dict[str, Setting]
Place = tuple[str, str]  # labels of a row and of a column


def merged(*parts: Setting) -> Setting:
    found = Setting()
    for part in parts:
        found.update(part)
    return found


@dataclass(frozen=True)
class Value:
    """A cell's number: a mean over `n` cases with its 95 % interval, which is None where n is 1."""

    mean: float
    low: float | None = None
    high: float | None = None
    n: int = 1


def measured(mean: float, low: float, high: float, n: int) -> Value:
    """Return a cell's number; an interval without bounds, that of one case, is left out."""
    return Value(mean, low, high, n) if math.isfinite(high - low) else Value(mean, n=n)


@dataclass
class Found:
    """The measured cells of a table. rows, columns: labels in their order; maps: {panel's title: {(y, x): a number}} of
    heat maps; notes: sentences on what is not here, and why."""

    cells: dict[Place, Value]
    maps: dict[str, dict[Place, float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Table:
    """A table or figure of a paper.

    name       table2, fig3
    says       what it shows, and what differs from the paper here
    measure    the function (session, table) that fills its cells
    rows, columns, common   the settings of a cell are those of its row, its column and the table together
    paper      {model: the paper's numbers}, each a text for `numbers`; "" as model: no model's
    kind       of picture: "points" (rows along x, a colour per column), "panels" (a panel per column) or "map"
    unit       of the numbers
    against    "gap": numbers are per cent of the full cache's score above it; "difference": numbers above the full
               cache's; "": as they are
    layers, kv_heads   fewest evicting layers and kv heads of a model on which the table says something
    """

    name: str
    says: str
    measure: Callable[..., Found]
    rows: Settings
    columns: Settings
    common: Setting = field(default_factory=lambda: Setting())
    paper: dict[str, str] = field(default_factory=dict)
    kind: str = "points"
    unit: str = "%"
    against: str = ""
    layers: int = 1
    kv_heads: int = 1

    def cells(self) -> dict[Place, Setting]:
        """Return {(row, column): the cell's settings}."""
        return {
            (row, column): merged(self.common, of_row, of_column)
            for row, of_row in self.rows.items() for column, of_column in self.columns.items()
        }  # fmt: skip

    def printed(self) -> dict[str, dict[Place, float]]:
        """Return {model: {(row, column): the paper's number}}."""
        return {model: numbers(text) for model, text in self.paper.items()}

    def changed(self, **changes: object) -> Table:
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Paper:
    """A paper's tables. cannot: {table or figure: why it is not made}."""

    title: str
    tables: tuple[Table, ...]
    cannot: dict[str, str]


def numbers(text: str) -> dict[Place, float]:
    """Parse a table: the first line has the labels of columns, each later one a row's label and its numbers, at least
    two spaces apart; - stands for no number."""
    head, *lines = (re.split(r"\s{2,}", line.strip()) for line in text.strip().splitlines())
    found = {}
    for label, *row in lines:
        if len(row) != len(head):
            raise ValueError(f"row {label!r} has {len(row)} numbers, the table {len(head)} columns")
        found |= {(label, column): float(x) for column, x in zip(head, row, strict=True) if re.fullmatch(NUMBER, x)}
    return found


def slots(*budgets: int) -> Settings:
    """Return settings of these budgets."""
    return {str(budget): Setting(budget=budget) for budget in budgets}


def methods(**policies: str) -> Settings:
    """Return settings of policies by label; in labels _ stands for a space."""
    return {label.replace("_", " "): Setting(policy=policy) for label, policy in policies.items()}


def crossed(outer: Settings, inner: Settings) -> Settings:
    """Return settings of every pair, labelled "outer, inner"."""
    return {f"{a}, {b}": merged(one, other) for a, one in outer.items() for b, other in inner.items()}


def paper(name: str, title: str, tables: Iterable[Table], **cannot: str) -> None:
    """Register a paper. cannot: why a table or figure is not made, by its name."""
    PAPERS.add(name)(Paper(title, tuple(tables), cannot))


load_folder(__name__)
