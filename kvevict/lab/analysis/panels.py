"""The parts of figures: panels, heat maps, ticks, legends, and a style per policy.

Colours are those of Okabe and Ito, which the colour-blind can tell apart; every line has a marker as well, and every
cell of a heat map its number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...policy.checks import installed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "osD^vPX<>p"
STYLES = ("-", "--", "-.", ":")
REFERENCES = ("oracle", "unpatched")  # drawn black or grey, dashed
MOST = 24  # panels that a page can hold


def make_figure(count: int, width: float, height: float, more: float = 0) -> tuple[Figure, int, int]:
    """A Figure for `count` panels, at most four in a row, and its rows and columns; sizes in inches, `more` beside the
    panels."""
    installed("plot", "a figure", "matplotlib")
    from matplotlib.figure import Figure

    if count > MOST:
        raise ValueError(f"{count} panels do not fit one figure; choose by --tasks, --policies, --budgets, --mode")
    columns = min(count, 4)
    rows = math.ceil(count / columns)
    size = columns * width + more, rows * height
    return Figure(figsize=size, layout="constrained", dpi=150), rows, columns


def make_panels(count: int, width: float, height: float, legend: bool = False) -> tuple[Figure, list[Any]]:
    """A Figure and `count` axes, with room for a legend or a colour bar."""
    figure, rows, columns = make_figure(count, width, height, 2 if legend else 1)
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for spare in axes[count:]:
        spare.remove()
    return figure, list(axes[:count])


def heat_maps(
    grids: dict[str, list[list[float]]],
    across: Sequence[Any],
    down: Sequence[Any],
    names: dict[str, str],
    colours: str,
    limits: tuple[float, float],
) -> Figure:
    """A heat map per name, with the numbers written in its cells where these are at most 16 across; NaN stays empty."""
    numbers = len(across) <= 16
    size = (max(2.6, 0.5 * len(across) + 1), max(2.2, 0.3 * len(down) + 1)) if numbers else (3.6, 3.2)
    figure, panels = make_panels(len(grids), *size)
    for panel, (name, grid) in zip(panels, grids.items(), strict=True):
        image = panel.imshow(grid, cmap=colours, vmin=limits[0], vmax=limits[1], aspect="auto")
        for y, row in enumerate(grid):
            for x, value in enumerate(row):
                if value == value and numbers:
                    red, green, blue, _ = image.cmap(image.norm(value))
                    dark = 0.3 * red + 0.59 * green + 0.11 * blue < 0.5
                    panel.text(x, y, f"{value:.0f}", ha="center", va="center", fontsize=7, color="w" if dark else "k")
        panel.set_title(name, fontsize=9)
        panel.set_xticks(*_every(across), rotation=45 if max(map(len, map(str, across))) > 3 else 0)
        panel.set_yticks(*_every(down))
        panel.set(xlabel=names["x"], ylabel=names["y"] if panel.get_subplotspec().is_first_col() else None)
    figure.colorbar(image, ax=panels, label=names["colour"])
    return figure


def _every(labels):
    """Positions and texts of at most 16 ticks."""
    places = range(0, len(labels), math.ceil(len(labels) / 16))
    return list(places), [labels[place] for place in places]


def is_reference(policy: str) -> bool:
    return policy.split(":")[0] in REFERENCES


def style_of(policy: str, i: int) -> dict[str, Any]:
    if is_reference(policy):
        return dict(color="k" if policy.startswith("oracle") else "0.45", marker="*", linestyle="--", markersize=8)
    return dict(
        color=COLOURS[i % len(COLOURS)], marker=MARKERS[i % len(MARKERS)], linestyle=STYLES[i // len(COLOURS) % 4],
        markersize=5,
    )  # fmt: skip


def set_ticks(panel: Axes, places: list[int]) -> None:
    panel.set_xticks(places, [f"{place:,}" for place in places], rotation=45)
    panel.minorticks_off()
    panel.grid(alpha=0.3)


def add_legend(figure: Figure, panels: list[Axes]) -> Figure:
    """One legend for all panels, outside of them."""
    known: dict[str, Any] = {}
    for panel in panels:
        for handle, label in zip(*panel.get_legend_handles_labels()):
            known.setdefault(label, handle)
    figure.legend(known.values(), known.keys(), loc="outside right upper")
    return figure
