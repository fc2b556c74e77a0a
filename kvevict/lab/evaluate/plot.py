"""Draws the figures of `kvevict plot`, in the colours of Okabe and Ito, which the colour-blind can tell apart."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from .results import Line
from .runs import FULL
from .summary import NOT_IN_PERCENT, summarize
from .tasks import FIDELITY

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "osD^vPX<>p"
STYLES = ("-", "--", "-.", ":")
MOST = 24  # most panels of a figure
DODGE = 0.2  # octaves (or turns) over which points at one budget (or turn) are spread: no interval hides another


def budget(lines: list[Line]) -> Figure:
    """Draw scores against the budget, with 95 % intervals: a panel per task and mode, and in it a line per policy. The
    full cache and the oracle are drawn as references."""
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
    figure, panels = _panels(len(columns))
    for panel, column in zip(panels, columns):
        _draw(panel, summary, column, names, budgets)
        half = 2**0.5  # the axis goes half an octave beyond the budgets: with one budget, shifts look small
        panel.set(xscale="log", xlabel=f"budget, {unit}", xlim=(budgets[0] / half, budgets[-1] * half))
        panel.set_xticks(budgets, [f"{each:,}" for each in budgets], rotation=45)
        panel.minorticks_off()
    return _with_legend(figure, panels)


def turns(lines: list[Line]) -> Figure:
    """Draw scores against the turn of a conversation, with 95 % intervals: a panel per task and mode, and in it a line
    for each policy and budget and for the full cache."""
    summary = summarize(lines, ("turn",))
    columns = list(dict.fromkeys((task, mode) for row in summary.values() for task, _, mode in row))
    if not columns:
        raise ValueError("there are no turns; write some with `kvevict eval --tasks turns`")
    figure, panels = _panels(len(columns))
    for panel, (task, mode) in zip(panels, columns):
        for i, ((policy, budget, _), cells) in enumerate(summary.items()):
            mine = {tags[0]: cell for (other, tags, way), cell in cells.items() if (other, way) == (task, mode)}
            style = dict(color="0.45", linestyle="--") if policy == FULL.policy else _style(policy, i)
            label = "full cache" if policy == FULL.policy else f"{policy}, {budget:.3g}"
            shift = DODGE * ((i + 0.5) / len(summary) - 0.5)
            _errorbar(panel, [turn + shift for turn in mine], list(mine.values()), 100, label, style)
        panel.set(title=f"{task}, {mode}", xlabel="turn", ylabel="score, %", ylim=(-3, 103))
        known = sorted({tags[0] for cells in summary.values() for _, tags, _ in cells})
        panel.set_xticks(known)
        panel.set_xlim(known[0] - 0.5, known[-1] + 0.5)
    return _with_legend(figure, panels)


def made_panels(count: int, width: float = 4.6, height: float = 3.8) -> tuple[Figure, list]:
    """Make a figure with `count` panels, of width and height in inches each, up to four beside each other."""
    from matplotlib.figure import Figure

    across, down = min(count, 4), math.ceil(count / 4)
    figure = Figure(figsize=(width * across, height * down + 0.7), layout="constrained", dpi=140)
    panels = figure.subplots(down, across, squeeze=False).flatten().tolist()
    for spare in panels[count:]:
        spare.remove()
    return figure, panels[:count]


def _panels(count: int) -> tuple[Figure, list]:
    if count > MOST:
        raise ValueError(f"{count} panels do not fit one figure; choose by --tasks, --policies, --budgets, --mode")
    return made_panels(count)


def _with_legend(figure: Figure, panels: list) -> Figure:
    known: dict[str, Any] = {}
    for panel in panels:
        panel.grid(alpha=0.3)
        known = dict(zip(*reversed(panel.get_legend_handles_labels()))) | known
    figure.legend(known.values(), known.keys(), loc="outside lower left", ncols=len(panels))
    return figure


def _errorbar(panel: Axes, x: list, cells: list, scale: int, label: str, style: dict) -> None:
    """Draw the means of cells with their intervals."""
    mean, low, high = zip(*((scale * cell.mean, scale * cell.low, scale * cell.high) for cell in cells))
    errors = [[m - l for m, l in zip(mean, low)], [h - m for m, h in zip(mean, high)]]
    panel.errorbar(x, mean, errors, label=label, capsize=2, elinewidth=0.8, **style)


def _draw(panel: Axes, summary: dict, column: tuple, names: list, budgets: list) -> None:
    """Draw a line for each (policy, chunk size) in `names`, in the panel of the `column` (task, tags, mode)."""
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
        label = policy + (f", chunk {chunk or 'whole'}" if chunked else "")
        _errorbar(panel, [b * shift for b in cells], list(cells.values()), scale, label, _style(policy, i))
    panel.set_title(f"{task}, {mode}", fontsize=10)
    panel.set(ylabel={FIDELITY: "KL divergence, nats"}.get(metric, metric if scale == 1 else "score, %"))
    if scale > 1:
        panel.set_ylim(-3, 103)


def _is_oracle(policy: str) -> bool:
    return policy.split(":")[0] == "oracle"


def _style(policy: str, i: int) -> dict:
    if _is_oracle(policy):
        return dict(color="k", marker="*", linestyle="--", markersize=8)
    return dict(
        color=COLOURS[i % len(COLOURS)], marker=MARKERS[i % len(MARKERS)], linestyle=STYLES[i // len(COLOURS) % 4],
        markersize=5,
    )  # fmt: skip
