"""Writes a table as CSV, Markdown and a picture: our numbers, and the paper's beside them."""

from __future__ import annotations

import csv
import io
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

from ...store import files
from ..evaluate.plot import COLOURS, MARKERS
from . import Found, Paper, Table, Value
from .session import Session

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREY = "0.45"
ACROSS = 4  # most panels beside each other
IN_ORDER = r"(layer )?[\d.,]+( %| tokens)?|all layers"  # labels of rows whose points are joined by lines
NUMBERED = 12  # most columns of a heat map whose cells have their numbers


def table(out: Path, made: Table, found: Found, drawn: bool) -> list[str]:
    """Write the files of a table, and return their names."""
    paths = {kind: out / f"{made.name}.{kind}" for kind in ("csv", "md")}
    files.write(paths["csv"], as_csv(made, found))
    files.write(paths["md"], as_markdown(made, found, drawn))
    names = [path.name for path in paths.values()]
    if drawn:
        with files.replacing(out / f"{made.name}.png") as temporary:
            picture(made, found).savefig(temporary, format="png")
        names.append(f"{made.name}.png")
    return names


def _labels(made: Table, found: Found) -> tuple[list[str], list[str]]:
    """Return the rows and the columns of what was measured, and then those that only the paper has."""
    ours, printed = list(found.cells), [place for each in made.printed().values() for place in each]
    rows, columns = ([*dict.fromkeys(place[i] for place in ours + printed)] for i in (0, 1))
    return rows, columns


def as_csv(made: Table, found: Found) -> str:
    text, printed = io.StringIO(), made.printed()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["row", "column", "ours", "low", "high", "n", *(f"paper {model}".strip() for model in printed)])
    rows, columns = _labels(made, found)
    for row in rows:
        for column in columns:
            own, theirs = found.cells.get((row, column)), [each.get((row, column)) for each in printed.values()]
            if own or any(x is not None for x in theirs):
                numbers = [own.mean, own.low, own.high, own.n] if own else [""] * 4
                writer.writerow([row, column, *("" if x is None else x for x in (*numbers, *theirs))])
    for title, each in found.maps.items():
        writer.writerows(
            [f"map {title}: {y}", x, value, "", "", "", *[""] * len(printed)] for (y, x), value in each.items()
        )
    return text.getvalue()


def number(x: float) -> str:
    return f"{x:.0f}" if abs(x) >= 1000 else f"{x:.3g}" if abs(x) < 10 else f"{x:.1f}"


def shown(value: Value) -> str:
    if value.low is None or value.high is None:
        return number(value.mean)
    return f"{number(value.mean)} [{number(value.low)}, {number(value.high)}]"


def as_markdown(made: Table, found: Found, drawn: bool) -> str:
    (rows, columns), printed = _labels(made, found), made.printed()
    counts = sorted({value.n for value in found.cells.values()})
    lines = [f"# {made.name}: {made.says}", ""]
    lines += ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for row in rows:
        cells = []
        for place in ((row, column) for column in columns):
            own, theirs = found.cells.get(place), [number(each[place]) for each in printed.values() if place in each]
            cells.append(" ".join([*([shown(own)] if own else []), *([f"({'; '.join(theirs)})"] if theirs else [])]))
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    n = f"n = {counts[0]}" if len(counts) == 1 else f"n = {counts[0]} to {counts[-1]}" if counts else "nothing measured"
    told = f"Unit: {made.unit}. " * bool(made.unit)
    told += f"{n}; in square brackets the 95 % interval" if counts[-1:] > [1] else "Computed, or of one run"
    of = " and ".join(model for model in printed if model)
    told += f"; in parentheses the paper's number{f' ({of})' if of else ''}." if printed else "."
    lines += ["", told, *found.notes]
    lines += ["", f"![{made.name}]({made.name}.png)"] if drawn else []
    return "\n".join(lines) + "\n"


def index(out: Path, paper: Paper, session: Session, done: dict[str, list[str]], failed: dict[str, str]) -> None:
    """Write README.md: the tables of a folder, and why others are not there."""
    others = [f"{name} {x}" for name, x in session.about.items() if x and name not in ("model", "weights")]
    about = ", ".join([f"model {Path(session.name).name}", *others])
    lines = [f"# {paper.title}", "", f"Measured with: {about}.", "", "| | shows | files |", "|---|---|---|"]
    for each in paper.tables:
        if each.name in done:
            links = ", ".join(f"[{name.rpartition('.')[2]}]({name})" for name in done[each.name])
            lines.append(f"| {each.name} | {each.says} | {links} |")
    missing = failed | paper.cannot
    lines += ["", "Not here:", "", *(f"- {name}: {reason}" for name, reason in missing.items())] if missing else []
    files.write(out / "README.md", "\n".join(lines) + "\n")


# -- pictures ---------------------------------------------------------------------------------------------------------


def picture(made: Table, found: Found) -> Figure:
    if found.maps:
        return heat_maps(found)
    rows, columns = _labels(made, found)
    panels = [[column] for column in columns] if made.kind == "panels" else [columns]
    figure, axes = _figure(len(panels), 3.6 if len(panels) > 1 else max(6.0, 0.45 * len(rows) + 3.5), 3.6)
    for axis, some in zip(axes, panels):
        _points(axis, made, found, rows, some)
        axis.set_title(some[0] if len(panels) > 1 else "", fontsize=9)
        axis.set_ylabel("" if len(panels) > 1 else made.unit)
    if len(panels) == 1:
        axes[0].legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)
    figure.suptitle(f"{made.name}: {made.says.partition('. ')[0]}", fontsize=10, wrap=True)
    return figure


def _figure(count: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    across, down = min(count, ACROSS), math.ceil(count / ACROSS)
    figure = Figure(figsize=(width * across, height * down + 0.4), layout="constrained", dpi=130)
    axes = figure.subplots(down, across, squeeze=False).flatten().tolist()
    for spare in axes[count:]:
        spare.remove()
    return figure, axes[:count]


def _points(axis: Axes, made: Table, found: Found, rows: list[str], columns: list[str]) -> None:
    """Draw our numbers with intervals, a colour per column, and the paper's as hollow marks."""
    line = "-" if all(re.fullmatch(IN_ORDER, row) for row, _ in found.cells) else "none"
    for i, column in enumerate(columns):
        colour, mark = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
        places = {row: x + 0.5 * ((i + 0.5) / len(columns) - 0.5) for x, row in enumerate(rows)}
        own = {at: found.cells[row, column] for row, at in places.items() if (row, column) in found.cells}
        if own:
            means = [value.mean for value in own.values()]
            low = [0 if value.low is None else value.mean - value.low for value in own.values()]
            high = [0 if value.high is None else value.high - value.mean for value in own.values()]
            axis.errorbar(list(own), means, [low, high], color=colour, marker=mark, linestyle=line, label=column,
                          capsize=2, markersize=5)  # fmt: skip
        for printed in made.printed().values():
            theirs = {at: printed[row, column] for row, at in places.items() if (row, column) in printed}
            if theirs:
                label = "" if own else f"{column} (paper)"
                axis.plot(list(theirs), list(theirs.values()), color=colour, marker=mark, linestyle="none", alpha=0.6,
                          fillstyle="none", markersize=7, label=label)  # fmt: skip
    turned = max(map(len, rows)) > 4
    axis.set_xticks(range(len(rows)), rows, rotation=45 * turned, ha="right" if turned else "center", fontsize=7)
    axis.grid(alpha=0.3)


def heat_maps(found: Found) -> Figure:
    """Draw a heat map per panel, all on one scale."""
    values = [value for each in found.maps.values() for value in each.values()]
    least, most = min(0.0, *values), max(100.0 if max(values) > 1 else 1.0, *values)
    figure, axes = _figure(len(found.maps), 3.0, 2.6)
    for axis, (title, each) in zip(axes, found.maps.items()):
        down, across = ([*dict.fromkeys(place[i] for place in each)] for i in (0, 1))
        shown = [[each.get((y, x), math.nan) for x in across] for y in down]
        image = axis.imshow(shown, cmap="RdYlGn", vmin=least, vmax=most, aspect="auto")
        if len(across) <= NUMBERED:
            for y, row in enumerate(shown):
                for x, value in enumerate(row):
                    axis.text(x, y, "" if value != value else number(value), ha="center", va="center", fontsize=6)
        axis.set_title(title, fontsize=8)
        for set_ticks, labels in ((axis.set_xticks, across), (axis.set_yticks, down)):
            step = math.ceil(len(labels) / NUMBERED)
            set_ticks(range(0, len(labels), step), labels[::step], fontsize=7)
    figure.colorbar(image, ax=axes)
    return figure
