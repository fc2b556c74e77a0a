"""Renders results as tables."""

import re
from collections.abc import Sequence
from statistics import median

from ...commands import grid
from .results import Line
from .summary import FEW, Summary, averages, summarize
from .tasks import FIDELITY
from .told import WIDTH

LONGEST = 44  # characters of a policy's text in one line of a table


def render(lines: list[Line], by: Sequence[str] = ()) -> str:
    """Make a table with a column per task and mode, preceded by the tasks' average if there are several. With tags
    `by`, make a table per task and mode, with a column per value of the tags. Tables of costs follow: of reading a text
    and of a question, if texts were read once for many questions; of each turn, if there are conversations."""
    if not lines:
        return "no results yet"
    near, likely = any(line["metric"] == FIDELITY for line in lines), any("nats" in line for line in lines)
    other = any(line["mode"] == "other" for line in lines)
    parts = [CAPTION + NEAR * near + OTHER * other + LIKELY * likely, *_tables(summarize(lines, by), by)]
    if alone := [line for line in lines if "ask_seconds" in line]:
        parts += [COSTS, fitted(_costs(alone, COLUMNS), 3)]
    if turns := [line for line in lines if "turn" in line["tags"]]:
        parts += [TURNS, fitted(_costs(turns, OF_TURNS, "mode", "turn"), 5)]
    if any(line["mode"] == "later" for line in lines):
        parts.append(LATER)
    return "\n\n".join(parts)


def _tables(summary: Summary, by: Sequence[str]) -> list[str]:
    columns, parts = list(dict.fromkeys(column for row in summary.values() for column in row)), []
    if not by:
        heads: dict = {f"{task}, {mode}": (task, (), mode) for task, _, mode in columns}
        for mode in dict.fromkeys(mode for *_, mode in columns):
            if means := averages(summary, mode):
                heads = {f"average, {mode}": (None, (), mode)} | heads
                summary = {row: cells | {(None, (), mode): means.get(row, "")} for row, cells in summary.items()}
        parts.append(fitted(_cells(summary, heads), 3))
        columns = []
    for task, mode in dict.fromkeys((task, mode) for task, _, mode in columns):
        values = sorted((value for other, value, its in columns if (other, its) == (task, mode)), key=_place)
        heads = {" ".join(map(str, value)): (task, value, mode) for value in values}
        parts += [f"{task}, {mode}, by {' and '.join(by)}", fitted(_cells(summary, heads), 3)]
    return parts


def _costs(lines: list, columns: dict, *by: str) -> list:
    """Make the rows of a table of median costs, the head first: a row for each policy, budget, chunk size and
    combination of values of the fields or tags `by`. `columns` maps a heading to (field, unit)."""
    rows: dict = {}
    for line in lines:
        known = line | line["tags"]
        key = *(line[name] for name in ("policy", "budget", "chunk_size")), *(known[name] or "" for name in by)
        rows.setdefault(key, []).append(line)

    def middle(own: list, name: str, unit: int) -> str:
        known = [line[name] for line in own if line.get(name) is not None]
        return f"{median(known) / unit:.2f}" if known else ""

    table = [
        [policy, *_setting(budget, chunk), *map(str, values), *(middle(own, *each) for each in columns.values())]
        for (policy, budget, chunk, *values), own in rows.items()
    ]
    return [["policy", "budget", "chunk", *by, *columns], *table]


def _place(value: tuple) -> list:
    """Return the sort key of the values of tags: numbers come before words."""
    return [(isinstance(each, str), each) for each in value]


CAPTION = (
    f"Score in %, its 95 % interval ([few]: under {FEW} cases), its share of the full cache's (perplexity: nats a\n"
    "token above it). known: the question is known while the prompt is read; later: it comes after the text was read."
)
NEAR = (
    "\nfidelity: mean KL divergence from the full cache's next-token distributions in nats, and the share of equal\n"
    "first choices, each with its standard error over cases, which are compared with the full cache one by one."
)
OTHER = "\nother: a control, in which a turn is asked of the slots that the turn before chose."
LIKELY = (
    "\nOf questions with a right answer's likelihood: score of those that the full cache answers (of COUNTED/ALL);\n"
    "dnll, the nats a token of the right answer above the full cache's, over all of them, with its paired interval."
)
LATER = (
    "For questions that come later choose take+edie:recall=true or, where no archive of all slots fits, a policy that\n"
    "needs none to read: gate, read-twice or others that `kvevict policies` lists."
)
COSTS = (
    "Medians: reading a text, what is kept of it and at most held meanwhile; one question and its answer, on a fork."
)
COLUMNS = {
    "read s": ("read_seconds", 1), "kept MiB": ("cache_bytes", 2**20), "peak MiB": ("peak_cache_bytes", 2**20),
    "question s": ("ask_seconds", 1), "question KiB": ("ask_bytes", 2**10),
}  # fmt: skip
TURNS = "Medians by turn: time to the first token, slots after that, the archive, and slots that came back from it."
OF_TURNS = {
    "first token s": ("read_seconds", 1), "kept MiB": ("cache_bytes", 2**20), "archive MiB": ("archive_bytes", 2**20),
    "came back MiB": ("recalled_bytes", 2**20),
}  # fmt: skip


def _cells(summary: dict, columns: dict) -> list:
    """Make the rows of a table, as texts, the head first. `columns` maps a heading to the key of the row's cell."""
    table = [["policy", "budget", "chunk", *columns]]
    for (policy, budget, chunk), row in summary.items():
        cells = [str(row[key]) if key in row else "" for key in columns.values()]
        if any(cells):
            table.append([policy, *_setting(budget, chunk), *cells])
    return table


def _setting(budget: float | None, chunk: int | None) -> list:
    return ["", ""] if budget is None else [str(budget), str(chunk or "whole")]


def fitted(table: Sequence[Sequence[str]], fixed: int = 1) -> str:
    """Format rows of text, the head first, in left-aligned columns and at most `WIDTH` characters a line. Long texts of
    the first column go on in further lines; columns that do not fit follow in further tables, each with the first
    `fixed` columns."""
    rows: list[list[str]] = []
    for first, *others in table:
        lines = _wrapped(first)
        rows += [[lines[0], *others], *([line, *("" for _ in others)] for line in lines[1:])]
    widths = [max(map(len, column)) + 2 for column in zip(*rows)]
    blocks: list[list[int]] = [[]]
    for at in range(fixed, len(widths)):
        if blocks[-1] and sum(widths[:fixed]) + sum(widths[each] for each in blocks[-1]) + widths[at] > WIDTH + 2:
            blocks.append([])
        blocks[-1].append(at)
    each = ([[row[at] for at in (*range(fixed), *block)] for row in rows] for block in blocks)
    return "\n\n".join(grid(part, left=len(part[0])) for part in each)


def _wrapped(text: str) -> list[str]:
    """Split a policy's text after commas, so that no line has more than `LONGEST` characters unless a part has."""
    lines = [""]
    for part in re.findall("[^,]*,|[^,]+", text) or [""]:
        if lines[-1] and len(lines[-1]) + len(part) > LONGEST:
            lines.append("  ")
        lines[-1] += part
    return lines
