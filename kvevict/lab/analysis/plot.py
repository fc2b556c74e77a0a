"""Figures of reports, `kvevict bench` and `kvevict diagnose`: every function takes data and returns a matplotlib
Figure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from .panels import add_legend, heat_maps, is_reference, make_panels, set_ticks, style_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LAYERS = dict(recall="attention kept", top16="best 16 slots kept", output_error="output error",
              attention_cosine="attention cosine")  # fmt: skip
OF_THE_FULL_CACHE = dict(sparsity="slots with 90 % of attention", fastcaote_spearman="FastCAOTE with CAOTE, rank corr.")


def slots(kept: dict[str, list[Any]]) -> Figure:
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
    return heat_maps(grids, list(range(heads)), list(range(depth)), names, "cividis", (0, top))


def speed(rows: list[dict[str, Any]]) -> Figure:
    """Time to first token and peak memory against prompt length, a line per policy: rows of `kvevict bench`, dicts with
    prompt_tokens, policy, read_seconds and peak_bytes."""
    if not rows:
        raise ValueError("there are no rows of `kvevict bench` with prompt_tokens and read_seconds")
    figure, panels = make_panels(2, 4.2, 3.4, legend=True)
    names = sorted(dict.fromkeys(row["policy"] for row in rows), key=is_reference)
    lengths = sorted({row["prompt_tokens"] for row in rows})
    for i, name in enumerate(names):
        own = sorted((row for row in rows if row["policy"] == name), key=lambda row: row["prompt_tokens"])
        x, style = [row["prompt_tokens"] for row in own], style_of(name, i)
        panels[0].plot(x, [row["read_seconds"] for row in own], label=name, **style)
        panels[1].plot(x, [row["peak_bytes"] / 2**20 for row in own], label=name, **style)
    for panel, label in zip(panels, ("time to first token, s", "growth of peak memory, MiB"), strict=True):
        panel.set(xlabel="prompt, tokens", ylabel=label, xscale="log", yscale="log")
        panel.yaxis.set_major_formatter("{x:g}")
        set_ticks(panel, lengths)
    return add_legend(figure, panels)


def layers(found: dict[str, Any]) -> Figure:
    """The numbers of each layer. found: the JSON of `kvevict diagnose`. A panel per measure, a line per policy."""
    measures = [
        name for name in LAYERS if any(name in layer for run in found["runs"].values() for layer in run["layers"])
    ]
    own = [name for name in OF_THE_FULL_CACHE if all(name in layer for layer in found.get("full_cache", [{}]))]
    figure, panels = make_panels(len(measures) + len(own), 3.8, 3.0, legend=True)
    for panel, name in zip(panels, measures):
        for i, (policy, run) in enumerate(found["runs"].items()):
            panel.plot([layer[name] for layer in run["layers"]], label=policy, **style_of(policy, i))
        panel.set_title(LAYERS[name], fontsize=10)
    for panel, name in zip(panels[len(measures) :], own, strict=True):
        panel.plot([layer[name] for layer in found["full_cache"]], color="0.45", marker="o", label="full cache")
        panel.set_title(OF_THE_FULL_CACHE[name], fontsize=10)
    for panel in panels:
        panel.set(xlabel="layer")
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.grid(alpha=0.3)
    return add_legend(figure, panels)


def overlap(found: dict[str, Any]) -> Figure:
    """How alike the layers' kept positions are (Jaccard), layer by layer, a panel per policy; found: the JSON of
    `kvevict diagnose`."""
    grids = {name: [[100 * x for x in row] for row in run["layer_overlap"]] for name, run in found["runs"].items()}
    ticks = list(range(max(map(len, grids.values()))))
    return heat_maps(grids, ticks, ticks, dict(x="layer", y="layer", colour="Jaccard, %"), "cividis", (0, 100))
