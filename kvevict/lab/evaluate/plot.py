"""Figures of results of `kvevict eval`: every function takes lines and returns a matplotlib Figure.

Colours are those of Okabe and Ito, which the colour-blind can tell apart. Every line has a marker as well, and every
cell of a heat map its number.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from .ask import FULL
from .summary import NOT_IN_PERCENT, summarize
from .tasks import FIDELITY

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "osD^vPX<>p"
STYLES = ("-", "--", "-.", ":")
MOST = 24  # panels that a page can hold
DODGE = 0.2  # octaves: the lines' points at one budget are spread over these, to show intervals side by side


def make_panels(count: int, width: float, height: float, margin: float) -> tuple[Figure, list[Any]]:
    """A Figure and `count` axes, at most four in a row, in inches. A legend or a colour bar needs `margin`."""
    from matplotlib.figure import Figure

    if count > MOST:
        raise ValueError(f"{count} panels do not fit one figure; choose by --tasks, --policies, --budgets, --mode")
    columns = min(count, 4)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(columns * width + margin, rows * height), layout="constrained", dpi=150)
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for spare in axes[count:]:
        spare.remove()
    return figure, list(axes[:count])


def heatmap(lines: list[dict[str, Any]]) -> Figure:
    """Scores by prompt length (x) and depth of the needle (y), a panel per run, from lines of `kvevict eval`."""
    panels: dict = {}
    for row, columns in summarize(lines, ("length", "depth")).items():
        for (task, (length, depth), mode), cell in columns.items():
            name = (task, row, None if row[0] == FULL.policy else mode)
            panels.setdefault(name, {})[depth, length] = 100 * cell.mean
    if not panels:
        raise ValueError("no line has the tags length and depth; evaluate the task needle, with several --lengths")
    panels = dict(sorted(panels.items(), key=lambda panel: panel[0][2] or ""))
    depths = sorted({depth for cells in panels.values() for depth, _ in cells})
    lengths = sorted({length for cells in panels.values() for _, length in cells})
    size = max(2.6, 0.5 * len(lengths) + 1), max(2.2, 0.3 * len(depths) + 1)
    figure, axes = make_panels(len(panels), *size, margin=1)
    for panel, (name, cells) in zip(axes, panels.items(), strict=True):
        grid = [[cells.get((depth, length), math.nan) for length in lengths] for depth in depths]
        image = panel.imshow(grid, cmap="RdYlGn", vmin=0, vmax=100, aspect="auto")
        for y, line in enumerate(grid):
            for x, value in enumerate(line):
                panel.text(x, y, "" if math.isnan(value) else f"{value:.0f}", ha="center", va="center", fontsize=7)
        panel.set_title(_title(name, panels), fontsize=9)
        panel.set_xticks(range(len(lengths)), lengths, rotation=45)
        panel.set_yticks(range(len(depths)), [f"{100 * depth:g}" for depth in depths])
        first = panel.get_subplotspec().is_first_col()
        panel.set(xlabel="prompt, tokens", ylabel="needle's depth, %" if first else None)
    figure.colorbar(image, ax=axes, label="score, %")
    return figure


def _title(name, all_names) -> str:
    """The title that tells a panel (task, (policy, budget, chunk), mode) from the others."""
    task, (policy, budget, chunk), mode = name
    parts = [task] if len({other[0] for other in all_names}) > 1 else []
    parts.append(policy)
    if budget is not None:
        parts.append(f"{budget} slots" if isinstance(budget, int) else f"{budget:g} kept")
        parts += [f"chunk {chunk}"] if chunk else []
    return ", ".join(parts) + (f"\n{mode}" if mode else "")


def budget(lines: list[dict[str, Any]]) -> Figure:
    """Score against budget with 95 % intervals, a panel per task and mode, a line per policy. The full cache and the
    oracle are drawn as references. From lines of `kvevict eval`."""
    summary = summarize(lines)
    rows = [row for row in summary if row[1] is not None]
    if not rows:
        raise ValueError("there are no results of a policy at a budget, only of the full cache")
    if any(isinstance(row[1], str) for row in rows):
        raise ValueError("budgets in bytes have no axis; choose others by --budgets")
    budgets = sorted({row[1] for row in rows})
    if len({isinstance(each, int) for each in budgets}) > 1:
        raise ValueError("slots and fractions cannot share an axis; choose by --budgets")
    unit = "slots per kv head" if isinstance(budgets[0], int) else "fraction of the tokens"
    names = sorted(dict.fromkeys((policy, chunk) for policy, _, chunk in rows), key=lambda name: _is_oracle(name[0]))
    columns = list(dict.fromkeys(column for row in summary.values() for column in row))
    figure, panels = make_panels(len(columns), 4.2, 3.4, margin=2)
    for panel, column in zip(panels, columns, strict=True):
        _draw(panel, summary, column, names, budgets)
        panel.set(xscale="log", xlabel=f"budget, {unit}")
        panel.set_xticks(budgets, [f"{each:,}" for each in budgets], rotation=45)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    known: dict[str, Any] = {}
    for panel in panels:
        known = dict(zip(*reversed(panel.get_legend_handles_labels()))) | known
    figure.legend(known.values(), known.keys(), loc="outside right upper")
    return figure


def _draw(panel, summary, column, names, budgets) -> None:
    """A panel's lines. column: (task, tags, mode); names: (policy, chunk size) of each line."""
    task, _, mode = column
    metric = next(row[column].metric for row in summary.values() if column in row)
    scale = 1 if metric in NOT_IN_PERCENT else 100
    full = summary.get((FULL.policy, None, None), {}).get(column)
    if full is not None:
        panel.axhline(scale * full.mean, color="0.45", linestyle="--", label="full cache")
        panel.axhspan(scale * full.low, scale * full.high, color="0.45", alpha=0.15, linewidth=0)
    chunked = len({chunk for _, chunk in names}) > 1
    for i, (policy, chunk) in enumerate(names):
        cells = {b: cell for b in budgets if (cell := summary.get((policy, b, chunk), {}).get(column))}
        if not cells:
            continue
        shift = 2 ** (DODGE * ((i + 0.5) / len(names) - 0.5))
        mean, low, high = zip(*((scale * cell.mean, scale * cell.low, scale * cell.high) for cell in cells.values()))
        errors = [[m - l for m, l in zip(mean, low)], [h - m for m, h in zip(mean, high)]]
        label = policy + (f", chunk {chunk or 'whole'}" if chunked else "")
        panel.errorbar([b * shift for b in cells], mean, errors, label=label, capsize=2, elinewidth=0.8,
                       **_style(policy, i))  # fmt: skip
    panel.set_title(f"{task}, {mode}", fontsize=10)
    panel.set(ylabel={FIDELITY: "KL divergence, nats"}.get(metric, metric if scale == 1 else "score, %"))
    if scale > 1:
        panel.set_ylim(-3, 103)


def _is_oracle(policy: str) -> bool:
    return policy.split(":")[0] == "oracle"


def _style(policy, i) -> dict[str, Any]:
    if _is_oracle(policy):
        return dict(color="k", marker="*", linestyle="--", markersize=8)
    return dict(
        color=COLOURS[i % len(COLOURS)], marker=MARKERS[i % len(MARKERS)], linestyle=STYLES[i // len(COLOURS) % 4],
        markersize=5,
    )  # fmt: skip
