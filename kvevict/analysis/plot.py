"""Figures from results: every function takes data and returns a matplotlib Figure.

Colours are those of Okabe and Ito, which the colour-blind can tell apart; every line has a marker as well, and every
cell of a heat map its number.
"""

import math
import re

from ..evaluate.ask import FULL, MODES
from ..evaluate.table import NOT_IN_PERCENT, summarize
from ..evaluate.tasks import FIDELITY

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "osD^vPX<>p"
STYLES = ("-", "--", "-.", ":")
LAYERS = dict(recall="attention kept", top16="best 16 slots kept", output_error="output error",
              attention_cosine="attention cosine")  # fmt: skip
OF_THE_FULL_CACHE = dict(sparsity="slots with 90 % of attention", fastcaote_spearman="FastCAOTE with CAOTE, rank corr.")
REFERENCES = ("oracle", "unpatched")  # drawn black or grey, dashed
DODGE = 0.2  # octaves over which the lines' points at one budget are spread, so that intervals lie beside each other
MOST = 24  # panels that a page can hold


def heatmap(lines):
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
    return _grids(grids, lengths, [f"{100 * d:g}" for d in depths], names, "RdYlGn", (0, 100))


def slots(kept: dict):
    """Slots kept per layer (y) and kv head (x): name -> [layer][head], None for a sliding-window layer; a panel per
    name. Of a report: `[layer and layer[0] for layer in kvevict.report(model)["kept"]]`."""
    heads = max(len(layer) for layers in kept.values() for layer in layers if layer)
    depth = max(map(len, kept.values()))
    grids = {
        name: [layer or [math.nan] * heads for layer in layers] + [[math.nan] * heads] * (depth - len(layers))
        for name, layers in kept.items()
    }
    top = max(n for grid in grids.values() for row in grid for n in row if n == n)
    names = dict(x="kv head", y="layer", colour="slots kept")
    return _grids(grids, list(range(heads)), list(range(depth)), names, "cividis", (0, top))


def mean_kept(lines) -> dict:
    """What `slots` takes, from lines of `kvevict eval`: the mean over the cases of every run but the full one."""
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


def budget(lines):
    """Score against budget with 95 % intervals, a panel per task and mode, a line per policy; full and oracle as
    references. From lines of `kvevict eval`."""
    curves = _Curves(lines)
    figure, panels = _panels(len(curves.columns), 4.2, 3.4, legend=True)
    for panel, column in zip(panels, curves.columns, strict=True):
        curves.draw(panel, column, curves.names)
    return _legend(figure, panels)


def families(lines):
    """As `budget`, a panel per method and what is made of it: snapkv, snapkv/kvcf, snapkv+caote and snapkv:window=8 are
    a family. Policies that have none share panels; the references are in all. One task and mode, or few."""
    curves = _Curves(lines)
    references = [name for name in curves.names if _refers(name[0])]
    together = {}
    for name in curves.names:
        if name not in references:
            together.setdefault(re.split("[-+/:]", name[0])[0], []).append(name)
    alone = [names[0] for names in together.values() if len(names) == 1]
    groups = {family: names for family, names in together.items() if len(names) > 1}
    for i in range(0, len(alone), len(COLOURS)):
        groups["others" if i == 0 else f"others {i // len(COLOURS) + 1}"] = alone[i : i + len(COLOURS)]
    drawn = [(column, *group) for column in curves.columns for group in groups.items()]
    figure, rows, columns = _figure(len(drawn), 3.9, 3.9)
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
        self.budgets = sorted({row[1] for row in rows})
        if len({isinstance(b, int) for b in self.budgets}) > 1:
            raise ValueError("slots and fractions cannot share an axis; choose by --budgets")
        self.names = sorted(dict.fromkeys((policy, chunk) for policy, _, chunk in rows), key=lambda n: _refers(n[0]))
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
                _line(panel, cells, 2 ** (DODGE * ((i + 0.5) / len(names) - 0.5)), label, _style(policy, i))
        task, _, mode = column
        metric = next(row[column].metric for row in self.summary.values() if column in row)
        label = {FIDELITY: "KL divergence, nats"}.get(metric, metric if metric in NOT_IN_PERCENT else "score, %")
        panel.set_title(f"{task}, {mode}", fontsize=10)
        unit = "slots per kv head" if isinstance(self.budgets[0], int) else "fraction of the tokens"
        panel.set(xscale="log", xlabel=f"budget, {unit}", ylabel=label)
        _ticks(panel, self.budgets)
        if metric not in NOT_IN_PERCENT:
            panel.set_ylim(-3, 103)


def speed(rows):
    """Time to first token and peak memory against prompt length, a line per policy: rows of `kvevict bench`, dicts with
    prompt_tokens, policy, read_seconds and peak_bytes."""
    if not rows:
        raise ValueError("there are no rows of `kvevict bench` with prompt_tokens and read_seconds")
    figure, panels = _panels(2, 4.2, 3.4, legend=True)
    names = sorted(dict.fromkeys(row["policy"] for row in rows), key=_refers)
    lengths = sorted({row["prompt_tokens"] for row in rows})
    for i, name in enumerate(names):
        own = sorted((row for row in rows if row["policy"] == name), key=lambda row: row["prompt_tokens"])
        x, style = [row["prompt_tokens"] for row in own], _style(name, i)
        panels[0].plot(x, [row["read_seconds"] for row in own], label=name, **style)
        panels[1].plot(x, [row["peak_bytes"] / 2**20 for row in own], label=name, **style)
    for panel, label in zip(panels, ("time to first token, s", "growth of peak memory, MiB"), strict=True):
        panel.set(xlabel="prompt, tokens", ylabel=label, xscale="log", yscale="log")
        panel.yaxis.set_major_formatter("{x:g}")
        _ticks(panel, lengths)
    return _legend(figure, panels)


def layers(found):
    """Per layer what `kvevict diagnose` says, found: its JSON. A panel per measure, a line per policy."""
    measures = [
        name for name in LAYERS if any(name in layer for run in found["runs"].values() for layer in run["layers"])
    ]
    own = [name for name in OF_THE_FULL_CACHE if all(name in layer for layer in found.get("full_cache", [{}]))]
    figure, panels = _panels(len(measures) + len(own), 3.8, 3.0, legend=True)
    for panel, name in zip(panels, measures):
        for i, (policy, run) in enumerate(found["runs"].items()):
            panel.plot([layer[name] for layer in run["layers"]], label=policy, **_style(policy, i))
        panel.set_title(LAYERS[name], fontsize=10)
    for panel, name in zip(panels[len(measures) :], own, strict=True):
        panel.plot([layer[name] for layer in found["full_cache"]], color="0.45", marker="o", label="full cache")
        panel.set_title(OF_THE_FULL_CACHE[name], fontsize=10)
    for panel in panels:
        panel.set(xlabel="layer")
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.grid(alpha=0.3)
    return _legend(figure, panels)


def overlap(found):
    """How alike the layers' kept positions are (Jaccard), layer by layer, a panel per policy; found: the JSON of
    `kvevict diagnose`."""
    grids = {name: [[100 * x for x in row] for row in run["layer_overlap"]] for name, run in found["runs"].items()}
    ticks = list(range(max(map(len, grids.values()))))
    return _grids(grids, ticks, ticks, dict(x="layer", y="layer", colour="Jaccard, %"), "cividis", (0, 100))


# -- parts ----------------------------------------------------------------------------------------------------------


def _figure(count, width, height, more=0):
    """A Figure for `count` panels, at most four in a row, and its rows and columns; sizes in inches, `more` beside the
    panels."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("figures need matplotlib; run: pip install 'kvevict[plot]'") from None
    if count > MOST:
        raise ValueError(f"{count} panels do not fit one figure; choose by --tasks, --policies, --budgets, --mode")
    columns = min(count, 4)
    rows = math.ceil(count / columns)
    size = columns * width + more, rows * height
    return Figure(figsize=size, layout="constrained", dpi=150), rows, columns


def _panels(count, width, height, legend=False):
    """A Figure and `count` axes, with room for a legend or a colour bar."""
    figure, rows, columns = _figure(count, width, height, 2 if legend else 1)
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for spare in axes[count:]:
        spare.remove()
    return figure, list(axes[:count])


def _grids(grids, across, down, names, colours, limits):
    """A heat map per name, with the numbers written in its cells where these are at most 16 across; NaN stays empty."""
    numbers = len(across) <= 16
    size = (max(2.6, 0.5 * len(across) + 1), max(2.2, 0.3 * len(down) + 1)) if numbers else (3.6, 3.2)
    figure, panels = _panels(len(grids), *size)
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


def _title(name, all_names) -> str:
    """What tells a panel (task, (policy, budget, chunk), mode) from the others."""
    task, (policy, budget, chunk), mode = name
    parts = [task] if len({other[0] for other in all_names}) > 1 else []
    parts.append(policy)
    if budget is not None:
        parts.append(f"{budget} slots" if isinstance(budget, int) else f"{budget:g} kept")
        parts += [f"chunk {chunk}"] if chunk else []
    return ", ".join(parts) + (f"\n{mode}" if mode else "")


def _refers(policy) -> bool:
    return policy.split(":")[0] in REFERENCES


def _style(policy, i) -> dict:
    if _refers(policy):
        return dict(color="k" if policy.startswith("oracle") else "0.45", marker="*", linestyle="--", markersize=8)
    return dict(
        color=COLOURS[i % len(COLOURS)], marker=MARKERS[i % len(MARKERS)], linestyle=STYLES[i // len(COLOURS) % 4],
        markersize=5,
    )  # fmt: skip


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


def _ticks(panel, places) -> None:
    panel.set_xticks(places, [f"{place:,}" for place in places], rotation=45)
    panel.minorticks_off()
    panel.grid(alpha=0.3)


def _legend(figure, panels):
    """One legend for all panels, outside of them."""
    known = {}
    for panel in panels:
        for handle, label in zip(*panel.get_legend_handles_labels()):
            known.setdefault(label, handle)
    figure.legend(known.values(), known.keys(), loc="outside right upper")
    return figure
