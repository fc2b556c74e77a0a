"""Writes a table as CSV, Markdown and a picture: our numbers, and the paper's beside them."""

from __future__ import annotations

import csv
import io
import itertools
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

from ...store import files
from ..evaluate.plot import COLOURS, MARKERS, made_panels
from . import Found, Paper, Place, Table, Value
from .session import Session
from .speed import COMPUTED

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

IN_ORDER = r"(layer |batch )?[\d.,]+( %| tokens)?|all layers"  # labels on the x axis whose points are joined by lines
HOLLOW = "hollow: the paper's"
NUMBERED = 12  # most columns of a heat map whose cells have their numbers
TURNED = 40  # letters of all labels of an x axis from which on they are turned


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
    """Return the rows and the columns of what was measured, and then those that only the paper has; the table's own in
    its order."""
    places = [*found.cells, *(place for each in made.printed().values() for place in each)]
    rows, columns = ([*dict.fromkeys(place[i] for place in places)] for i in (0, 1))
    for labels, own in ((rows, [*made.rows]), (columns, [*made.columns])):
        labels.sort(key=lambda label: own.index(label) if label in own else len(own))
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
    """Format a number with three digits, a whole one and one of more digits without a point."""
    if abs(x) >= 100 or x == round(x):
        return f"{x:.0f}"
    return f"{x:.3g}" if abs(x) < 1 else f"{x:.2f}" if abs(x) < 10 else f"{x:.1f}"


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
    told += "Computed" if made.measure in COMPUTED else n
    told += "; in square brackets the 95 % interval" * any(value.low is not None for value in found.cells.values())
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


def title(made: Table) -> str:
    """Return a table's name and the first sentence of what it shows."""
    return f"{made.name}: {re.split(r'[.] (?=[A-Z])', made.says)[0]}"


def picture(made: Table, found: Found) -> Figure:
    """Draw what was measured: heat maps, or points with their intervals and the paper's numbers."""
    if found.maps:
        return heat_maps(made, found)
    rows, columns = ([x for x in labels if any(x == place[i] for place in found.cells)]
                     for i, labels in enumerate(_labels(made, found)))  # fmt: skip
    panels = [[column] for column in columns] if made.kind == "panels" else [columns]
    many, alone = len(panels) > 1, columns[0] if len(columns) == 1 else ""
    figure, axes = made_panels(len(panels), 3.6 if many else max(6.0, 0.45 * len(rows) + 3.5), 3.6)
    marks: dict[str, Artist] = {}
    for axis, some in zip(axes, panels):
        marks |= _points(axis, made, found, _series(rows, some, made.kind == "panels"))
        axis.set_title(some[0] if many else "", fontsize=9)
        axis.set_ylabel("" if many else made.unit or alone)
    titled = columns if many or alone else []
    told = [name for name in marks if name not in (*titled, HOLLOW)]
    if told := told + [HOLLOW] * (HOLLOW in marks):
        figure.legend([marks[name] for name in told], told, loc="outside right center", fontsize=8)
    figure.suptitle(title(made), fontsize=10, wrap=True)
    return figure


def _series(rows: list[str], columns: list[str], panel: bool) -> dict[str, dict[str, Place]]:
    """Return {label of a colour: {label on the x axis: the cell}}. In a panel rows such as "SnapKV, 512 tokens" have a
    colour per method; else each column has one."""
    pairs = {row: tuple(row.split(", ")) for row in rows}
    if not panel or any(len(pair) != 2 for pair in pairs.values()):
        return {column: {row: (row, column) for row in rows} for column in columns}
    first = all(re.fullmatch(IN_ORDER, pair[0]) for pair in pairs.values())
    found: dict[str, dict[str, Place]] = {}
    for row, pair in pairs.items():
        at, name = pair if first else pair[::-1]
        found.setdefault(name, {})[at] = row, columns[0]
    return found


def _points(axis: Axes, made: Table, found: Found, series: dict[str, dict[str, Place]]) -> dict[str, Artist]:
    """Draw our numbers with intervals, a colour per series, and the paper's as hollow marks. Returns what a legend
    has."""
    labels = [*dict.fromkeys(at for each in series.values() for at in each)]
    line = "-" if all(re.fullmatch(IN_ORDER, label) for label in labels) else "none"
    marks: dict[str, Artist] = {}
    for i, (name, places) in enumerate(series.items()):
        colour, mark = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
        x = {label: at + 0.5 * ((i + 0.5) / len(series) - 0.5) for at, label in enumerate(labels)}
        own = {x[label]: found.cells[place] for label, place in places.items() if place in found.cells}
        if own:
            means = [value.mean for value in own.values()]
            low = [0 if value.low is None else value.mean - value.low for value in own.values()]
            high = [0 if value.high is None else value.high - value.mean for value in own.values()]
            marks[name], *_ = axis.errorbar(list(own), means, [low, high], color=colour, marker=mark, linestyle=line,
                                            capsize=2, markersize=5)  # fmt: skip
        for printed in made.printed().values():
            theirs = {x[label]: printed[place] for label, place in places.items() if place in printed}
            if theirs:
                (hollow,) = axis.plot(list(theirs), list(theirs.values()), color=colour, marker=mark, linestyle="none",
                                      alpha=0.6, fillstyle="none", markersize=7)  # fmt: skip
                marks.setdefault(HOLLOW, hollow)
    turned = sum(map(len, labels)) > TURNED
    axis.set_xticks(range(len(labels)), labels, rotation=45 * turned, ha="right" if turned else "center", fontsize=7)
    axis.grid(alpha=0.3)
    return marks


def heat_maps(made: Table, found: Found) -> Figure:
    """Draw a heat map per panel, all on one scale."""
    values = [value for each in found.maps.values() for value in each.values()]
    least, most = min(0.0, *values), max(100.0 if max(values) > 1 else 1.0, *values)
    figure, axes = made_panels(len(found.maps), 3.0, 2.6)
    for axis, (panel, each) in zip(axes, found.maps.items()):
        down, across = ([*dict.fromkeys(place[i] for place in each)] for i in (0, 1))
        shown = [[each.get((y, x), math.nan) for x in across] for y in down]
        image = axis.imshow(shown, cmap="RdYlGn", vmin=least, vmax=most, aspect="auto")
        if len(across) <= NUMBERED:
            for (y, row), x in itertools.product(enumerate(shown), range(len(across))):
                dark = not 0.15 < (row[x] - least) / (most - least) < 0.85
                axis.text(x, y, "" if math.isnan(row[x]) else number(row[x]), ha="center", va="center", fontsize=7,
                          color="white" if dark else "black")  # fmt: skip
        axis.set_title(panel, fontsize=8)
        for set_ticks, labels in ((axis.set_xticks, across), (axis.set_yticks, down)):
            step = math.ceil(len(labels) / NUMBERED)
            set_ticks(range(0, len(labels), step), labels[::step], fontsize=7)
    figure.supylabel("depth" if made.kind == "map" else "layer", fontsize=8)
    figure.supxlabel("tokens" if made.kind == "map" else "layer", fontsize=8)
    figure.suptitle(title(made), fontsize=10, wrap=True)
    figure.colorbar(image, ax=axes)
    return figure
