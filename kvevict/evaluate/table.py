"""Results as tables, in text or Markdown."""

from .summary import averages, summarize
from .tasks import FIDELITY


def render(lines, by=(), markdown=False) -> str:
    """A table with a column per task and mode, and of several tasks their average first; with tags `by`, a table per
    task and mode with a column per value."""
    if not lines:
        return "no results yet"
    summary = summarize(lines, by)
    columns = list(dict.fromkeys(column for row in summary.values() for column in row))
    parts = [CAPTION + (NEAR if any(line["metric"] == FIDELITY for line in lines) else "")]
    if not by:
        heads = {f"{task}, {mode}": (task, (), mode) for task, _, mode in columns}
        for mode in dict.fromkeys(mode for *_, mode in columns):
            if means := averages(summary, mode):
                heads = {f"average, {mode}": (None, (), mode)} | heads
                summary = {row: cells | {(None, (), mode): means.get(row, "")} for row, cells in summary.items()}
        parts.append(format_table(_cells(summary, heads), markdown))
        columns = []
    for task, mode in dict.fromkeys((task, mode) for task, _, mode in columns):
        values = sorted((value for other, value, its in columns if (other, its) == (task, mode)), key=_place)
        heads = {" ".join(map(str, value)): (task, value, mode) for value in values}
        parts += [f"{task}, {mode}, by {' and '.join(by)}", format_table(_cells(summary, heads), markdown)]
    return "\n\n".join(parts)


def _place(value):
    """Sorts values of tags, of which some may be words and some numbers."""
    return [(isinstance(each, str), each) for each in value]


CAPTION = (
    "Score in % (perplexity as such), its 95 % interval, and its share of the full cache's. aware: the question is\n"
    "known while the prompt is read; agnostic: it comes after the context was compressed."
)
NEAR = (
    "\nfidelity: mean KL divergence from the full cache's next-token distributions in nats, and the share of equal\n"
    "first choices, each with its standard error over cases, which are compared with the full cache one by one."
)


def _cells(summary, columns: dict) -> list:
    """Rows of text, the head first. columns: head -> key of the cell."""
    table = [["policy", "budget", "chunk", *columns]]
    for (policy, budget, chunk), row in summary.items():
        cells = [str(row[key]) if key in row else "" for key in columns.values()]
        if any(cells):
            setting = ["", ""] if budget is None else [str(budget), str(chunk or "whole")]
            table.append([policy, *setting, *cells])
    return table


def format_table(table, markdown: bool = False, left: int | None = None) -> str:
    """Rows of texts, the head first, as aligned columns or in Markdown; the first `left` columns (None: all) are
    aligned left, the others right."""
    from tabulate import tabulate

    width = len(table[0])
    left = width if left is None else left
    form = dict(headers="firstrow", tablefmt="github") if markdown else dict(tablefmt="plain")
    return tabulate(table, **form, disable_numparse=True, colalign=("left",) * left + ("right",) * (width - left))
