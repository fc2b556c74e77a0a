"""Shows the kept slots of a prompt, as a self-contained HTML page (page.html with the data inserted) and as a
picture."""

from __future__ import annotations

import bisect
import json
import os
import re
from collections.abc import Collection, Iterable
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...asking.prompts import Tokenizer, pieces
from ...store.files import replacing

if TYPE_CHECKING:
    import torch


def page(
    tokenizer: Tokenizer, ids: torch.Tensor, runs: list[dict[str, Any]], facts: Iterable[tuple[str, str]] = (),
    find: str = "",
) -> str:  # fmt: skip
    """Return the HTML page of one prompt.

    ids     the prompt, ids [1, N]
    runs    a dict for each policy, or for each policy and question: name, answer, facts, and `positions` of
            `kvevict.report(model, positions=True)`; positions from N on are not shown. The run of a question that was
            asked after the text also has `before`, the index of the text's run in `runs`: the page marks the slots that
            came back since
    facts   (name, text) pairs that are shown above the prompt, such as the model and the question; a run's facts are
            shown with the run
    find    words that are underlined wherever the prompt has them
    """
    tokens = ids.shape[1]

    def kept(layer: list | None) -> list | None:
        return layer and [gaps([at for at in head if at < tokens]) for head in layer[0]]

    runs = [run | dict(kept=[*map(kept, run["positions"])], positions=None) for run in runs]
    data = dict(tokens=tokens, pieces=pieces(tokenizer, ids[0].tolist()), facts=[*facts], find=find, runs=runs)
    template = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    return template.replace("__DATA__", json.dumps(data).replace("<", "\\u003c"))  # so that no text ends the script


def gaps(positions: list) -> list:
    """Encode ascending positions as [gap, length, gap, length, ...] of their runs. Positions [0, 1, 2, 7] give [0, 3,
    4, 1]."""
    made, end = [], 0
    for at in positions:
        if made and at == end:
            made[-1] += 1
        else:
            made += [at - end, 1]
        end = at + 1
    return made


def places(pieces: list, words: str) -> list:
    """List the position of the first token of each occurrence of `words` in the text of `pieces`."""
    text = "".join(text for text, _ in pieces)
    starts = list(accumulate((len(text) for text, _ in pieces), initial=0))
    positions = list(accumulate((count for _, count in pieces), initial=0))
    found = (match.start() for match in re.finditer(re.escape(words), text))
    return [positions[bisect.bisect_right(starts, at) - 1] for at in found]


def picture(
    path: str | os.PathLike, runs: list[dict[str, Any]], tokens: int, title: str, marks: Collection[int] = ()
) -> None:
    """Save a PNG of one prompt of `tokens` tokens. Each run, a dict as `page` takes it, is a map with a row per kv
    head, layer by layer, which is dark at kept positions; triangles above it point to the positions `marks`. Raises
    ImportError without matplotlib."""
    import numpy as np
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 2 + 1.5 * len(runs)), layout="constrained")
    for run, axes in zip(runs, figure.subplots(len(runs), sharex=True, squeeze=False)[:, 0]):
        layers = [layer[0] for layer in run["positions"] if layer is not None]
        kept = np.zeros((sum(map(len, layers)), tokens))
        for row, positions in zip(kept, (head for layer in layers for head in layer)):
            row[positions] = 1
        extent = (-0.5, tokens - 0.5, len(layers), 0)
        axes.imshow(kept, aspect="auto", cmap="Oranges", interpolation="none", vmax=1.2, extent=extent)
        for mark in marks:
            axes.plot(mark, 0, "v", color="tab:blue", clip_on=False)
        axes.set(title=f"{run['name']}: {run['answer']}", ylabel="layer")
    axes.set_xlabel("position in the prompt")
    figure.suptitle(title)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=150)
