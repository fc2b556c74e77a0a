"""Figures of results of `kvevict eval`: every function takes lines and returns a matplotlib Figure."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from ..analysis.panels import (
    COLOURS,
    add_legend,
    heat_maps,
    is_reference,
    make_figure,
    make_panels,
    set_ticks,
    style_of,
)
from .ask import FULL, MODES
from .summary import NOT_IN_PERCENT, summarize
from .tasks import FIDELITY

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DODGE = 0.2  # octaves: the lines' points at one budget are spread over these, to show intervals side by side


def heatmap(lines: list[dict[str, Any]]) -> Figure:
    """Scores by prompt length (x) and depth of the needle (y), a panel per run, from lines of `kvevict eval`."""
    panels = {}
    for row, columns in summarize(lines, ("length", "depth")).items():
        for (task, (length, depth), mode), cell in columns.items():
            name = (task, row, None if row[0] == FULL.policy else mode)
            panels.setdefault(name, {})[depth, length] = cell.mean
    panels = dict(sorted(panels.items(), key=lambda panel: MODES.index(panel[0][2]) if panel[0][2] else -1))
    if not panels:
        raise ValueError("no line has the tags length and depth; evaluate the task needle, with several --lengths")
    depths = sorted({depth for cells in panels.values() for depth, _ in cells})
    lengths = sorted({length for cells in panels.values() for _, length in cells})
    grids = {
        _title(name, panels): [[100 * cells.get((d, n), math.nan) for n in lengths] for d in depths]
        for name, cells in panels.items()
    }
    names = dict(x="prompt, tokens", y="needle's depth, %", colour="score, %")
    return heat_maps(grids, lengths, [f"{100 * d:g}" for d in depths], names, "RdYlGn", (0, 100))


def mean_kept(lines: list[dict[str, Any]]) -> dict[str, list]:
    """The argument of `slots`, from lines of `kvevict eval`: the mean over the cases of every run but the full one."""
    groups = {}
    for line in lines:
        if line["policy"] != FULL.policy:
            row = line["policy"], line["budget"], line["chunk_size"]
            groups.setdefault((None, row, line["mode"]), []).append(line["kept"])
    if not groups:
        raise ValueError("there are no results of a policy, only of the full cache")
    return {
        _title(name, groups): [
            None if layer[0] is None else [sum(counts) / len(counts) for counts in zip(*layer)] for layer in zip(*group)
        ]
        for name, group in groups.items()
    }  # fmt: skip


def budget(lines: list[dict[str, Any]]) -> Figure:
    """Score against budget with 95 % intervals, a panel per task and mode, a line per policy; full and oracle as
    references. From lines of `kvevict eval`."""
    curves = _Curves(lines)
    figure, panels = make_panels(len(curves.columns), 4.2, 3.4, legend=True)
    for panel, column in zip(panels, curves.columns, strict=True):
        curves.draw(panel, column, curves.names)
    return add_legend(figure, panels)


def families(lines: list[dict[str, Any]]) -> Figure:
    """As `budget`, with a panel per family of policies: snapkv, snapkv+caote and snapkv:window=8 are one.
    Policies without a family share panels; the references are in all. For one task and mode, or few."""
    curves = _Curves(lines)
    references = [name for name in curves.names if is_reference(name[0])]
    together = {}
    for name in curves.names:
        if name not in references:
            together.setdefault(re.split("[-+/:]", name[0])[0], []).append(name)
    alone = [names[0] for names in together.values() if len(names) == 1]
    groups = {family: names for family, names in together.items() if len(names) > 1}
    for i in range(0, len(alone), len(COLOURS)):
        groups["others" if i == 0 else f"others {i // len(COLOURS) + 1}"] = alone[i : i + len(COLOURS)]
    drawn = [(column, *group) for column in curves.columns for group in groups.items()]
    figure, rows, columns = make_figure(len(drawn), 3.9, 3.9)
    for part, (column, family, names) in zip(figure.subfigures(rows, columns, squeeze=False).flat, drawn):
        panel = part.subplots()
        curves.draw(panel, column, [*names, *references])
        panel.set_title(f"{family}: {panel.get_title()}", fontsize=10)
        handles, labels = panel.get_legend_handles_labels()
        columns = 1 if max(map(len, labels)) > 28 else 2  # beside each other they would be wider than the panel
        part.legend(handles, labels, loc="outside lower center", fontsize=7, ncols=columns)
    return figure


class _Curves:
    """Scores against budgets, from lines of `kvevict eval`.

    columns   (task, tags, mode) of each panel
    names     (policy, chunk size) of each line, the references last
    """

    def __init__(self, lines):
        self.summary = summarize(lines)
        self.columns = list(dict.fromkeys(column for row in self.summary.values() for column in row))
        rows = [row for row in self.summary if row[1] is not None]
        if not rows:
            raise ValueError("there are no results of a policy at a budget, only of the full cache")
        if any(isinstance(row[1], str) for row in rows):
            raise ValueError("budgets in bytes have no axis; choose others by --budgets")
        self.budgets = sorted({row[1] for row in rows})
        if len({isinstance(b, int) for b in self.budgets}) > 1:
            raise ValueError("slots and fractions cannot share an axis; choose by --budgets")
        names = dict.fromkeys((policy, chunk) for policy, _, chunk in rows)
        self.names = sorted(names, key=lambda name: is_reference(name[0]))
        self.chunked = len({chunk for _, chunk in self.names}) > 1

    def draw(self, panel, column, names) -> None:
        for (policy, _, _), row in self.summary.items():
            if policy == FULL.policy and column in row:
                _reference(panel, row[column])
        for i, (policy, chunk) in enumerate(names):
            cells = {b: self.summary.get((policy, b, chunk), {}).get(column) for b in self.budgets}
            cells = {b: cell for b, cell in cells.items() if cell}
            label = policy + (f", chunk {chunk or 'whole'}" if self.chunked else "")
            if cells:
                _line(panel, cells, 2 ** (DODGE * ((i + 0.5) / len(names) - 0.5)), label, style_of(policy, i))
        task, _, mode = column
        metric = next(row[column].metric for row in self.summary.values() if column in row)
        label = {FIDELITY: "KL divergence, nats"}.get(metric, metric if metric in NOT_IN_PERCENT else "score, %")
        panel.set_title(f"{task}, {mode}", fontsize=10)
        unit = "slots per kv head" if isinstance(self.budgets[0], int) else "fraction of the tokens"
        panel.set(xscale="log", xlabel=f"budget, {unit}", ylabel=label)
        set_ticks(panel, self.budgets)
        if metric not in NOT_IN_PERCENT:
            panel.set_ylim(-3, 103)


def _title(name, all_names) -> str:
    """The title that tells a panel (task, (policy, budget, chunk), mode) from the others."""
    task, (policy, budget, chunk), mode = name
    parts = [task] if len({other[0] for other in all_names}) > 1 else []
    parts.append(policy)
    if budget is not None:
        parts.append(f"{budget} slots" if isinstance(budget, int) else f"{budget:g} kept")
        parts += [f"chunk {chunk}"] if chunk else []
    return ", ".join(parts) + (f"\n{mode}" if mode else "")


def _scaled(cell) -> tuple:
    """(mean, low, high) as drawn: scores in %."""
    scale = 1 if cell.metric in NOT_IN_PERCENT else 100
    return scale * cell.mean, scale * cell.low, scale * cell.high


def _reference(panel, cell) -> None:
    """The full cache as a line across the panel, with its interval."""
    mean, low, high = _scaled(cell)
    panel.axhline(mean, color="0.45", linestyle="--", label="full cache")
    panel.axhspan(low, high, color="0.45", alpha=0.15, linewidth=0)


def _line(panel, cells, shift, label, style) -> None:
    """budget -> Cell as a line with intervals, its budgets multiplied by `shift`."""
    mean, low, high = zip(*map(_scaled, cells.values()))
    errors = [[m - l for m, l in zip(mean, low)], [h - m for m, h in zip(mean, high)]]
    panel.errorbar([b * shift for b in cells], mean, errors, label=label, capsize=2, elinewidth=0.8, **style)
