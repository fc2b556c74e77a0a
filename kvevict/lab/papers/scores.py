"""Tables of scores: every cell is a run of `kvevict eval` over the cases of some tasks."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from ..evaluate import results
from ..evaluate.intervals import of_scores, student
from ..evaluate.results import Line
from ..evaluate.run import Evaluation, evaluate
from ..evaluate.runs import FULL, RunSpec
from ..evaluate.tasks import PERPLEXITY
from ..evaluate.tasks.longbench import records
from . import Found, Place, Setting, Settings, Table, Value, measured, merged
from .session import Session

LONGBENCH = ("longbench",)
MADE_UP = ("facts", "multivalue", "keyvalue", "tracking")
NEEDLES = "single_1 single_2 single_3 multikey_1 multikey_2 multikey_3 multivalue multiquery"
RULER = (*(f"ruler/niah_{name}" for name in NEEDLES.split()), "ruler/vt", "ruler/cwe", "ruler/fwe")
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
AVERAGE = "average"


def tasks_of(session: Session, name: str) -> tuple[str, ...]:
    """Return the tasks that `Setting.tasks` names: "niah", needles at five depths; "answers", LongBench's with --data,
    else made-up facts; "ruler", for the bundled model made-up facts; else the task of that name."""
    if name == "answers":
        return MADE_UP if session.data is None else LONGBENCH
    if name == "ruler":
        return MADE_UP if session.bundled else RULER
    return {"niah": ("needle",)}.get(name, (name,))


def _recorded(session: Session) -> Counter[str]:
    """Count the records of each of LongBench's tasks in --data."""
    return Counter(record["task"] for record in records(Path(session.data or "")))


@dataclass(frozen=True)
class Cells(Evaluation):
    """An evaluation of the given runs, instead of all combinations of policies and budgets."""

    given: tuple[RunSpec, ...] = ()

    def runs(self, layers: int = 1) -> list[RunSpec]:
        return [FULL, *dict.fromkeys(run for run in self.given if run != FULL)]


@dataclass(frozen=True)
class Group:
    """Cells that share tasks and temperature, and so a file of results."""

    tasks: str
    temperature: float | None

    def file(self, session: Session) -> Path:
        warm = "" if self.temperature is None else f"-{self.temperature}"
        return session.out / "answers" / f"{self.tasks}{warm}.jsonl"

    def plan(self, session: Session, runs: tuple[RunSpec, ...]) -> Cells:
        many = self.tasks in ("niah", "ruler")  # at every length, fewer cases each
        return Cells(
            tasks_of(session, self.tasks), session.lengths if many else session.lengths[-1:], (), (), modes=("known",),
            cases=session.cases if many else 2 * session.cases, depths=DEPTHS, haystack=session.haystack,
            data=session.data, temperature=self.temperature, given=runs,
        )  # fmt: skip

    def size(self, session: Session) -> int:
        """Return the number of cases of each run."""
        plan = self.plan(session, ())
        if plan.tasks == LONGBENCH:
            return sum(min(plan.cases, count) for count in _recorded(session).values())
        each = len(DEPTHS) if self.tasks == "niah" else 1
        return len(plan.tasks) * len(plan.lengths) * plan.cases * each


def expanded(session: Session, settings: Settings, tasks: str) -> Settings:
    """Replace a label with "{length}" by one for each length, "{task}" by one for each task and for their average."""
    found: Settings = {}
    for label, one in settings.items():
        if "{length}" in label:
            told = {n: label.replace("{length}", f"{n} tokens") for n in session.lengths}
            found |= {text: merged(one, Setting(length=n)) for n, text in told.items()}
        elif label == "{task}":
            names = tasks_of(session, tasks)
            names = tuple(_recorded(session)) if names == LONGBENCH else names
            found |= {name: merged(one, Setting(task=name)) for name in names} | {AVERAGE: one}
        else:
            found[label] = one
    return found


def laid_out(session: Session, table: Table) -> Table:
    tasks = table.common.get("tasks", "answers")
    rows, columns = (expanded(session, each, tasks) for each in (table.rows, table.columns))
    return table.changed(rows=rows, columns=columns)


def groups(session: Session, table: Table) -> dict[Group, dict[RunSpec, None]]:
    """Return {group: its runs, `full` among them} of a table's cells that the model can run."""
    found: dict[Group, dict[RunSpec, None]] = {}
    for cell in laid_out(session, table).cells().values():
        run = session.run_of(cell)
        if session.usable(run):
            found.setdefault(Group(cell["tasks"], cell.get("temperature")), {FULL: None})[run] = None
    return found


def scores(session: Session, table: Table) -> Found:
    """Evaluate what the file of results lacks, and average."""
    lines: dict[Group, list[Line]] = {}
    for group, runs in groups(session, table).items():
        file = group.file(session)
        file.parent.mkdir(parents=True, exist_ok=True)
        plan = group.plan(session, tuple(runs))
        evaluate(session.model, session.tokenizer, plan, file, session.name, shared=session.bar)
        lines[group] = results.read(file)[1]
    found = Found({})
    for place, cell in laid_out(session, table).cells().items():
        run = session.run_of(cell)
        if not session.usable(run):
            continue
        known = lines[Group(cell["tasks"], cell.get("temperature"))]
        own, full = (_chosen(known, each, cell) for each in (run, FULL))
        if own:
            found.cells[place] = value(own, full, table.against)
        if table.kind == "map":
            found.maps[_title(place, found)] = _map(own)
    if made_up := {group.tasks for group in lines if group.plan(session, ()).tasks == MADE_UP}:
        names = " and ".join({"answers": "LongBench", "ruler": "RULER"}[each] for each in sorted(made_up))
        found.notes.append(f"In place of {names} these are made-up tasks: {', '.join(MADE_UP)}.")
    if any(not any(line["score"] for line in each if line["policy"] == FULL.policy) for each in lines.values()):
        found.notes.append("The full cache itself answers none of these questions: another model or --lengths would.")
    return found


def _chosen(lines: list[Line], run: RunSpec, cell: Setting) -> list[Line]:
    length, task = cell.get("length"), cell.get("task")
    return [
        line for line in lines
        if RunSpec(*(line[name] for name in vars(FULL))) == run and length in (None, line["tags"]["length"])
        and task in (None, line["task"], line["tags"].get("of"))
    ]  # fmt: skip


def value(own: list[Line], full: list[Line], against: str) -> Value:
    """Average a cell's lines: scores in per cent, perplexities as such. `full` are the full cache's lines of the same
    cases, for what `Table.against` names."""
    n, perplexity = len(own), own[0]["metric"] == PERPLEXITY
    base = {(line["task"], line["id"], line["seed"]): line["score"] for line in full}
    apart = [line["score"] - base[line["task"], line["id"], line["seed"]] for line in own]
    ours, mean = sum(apart) / n, sum(base.values()) / n
    half = student(apart)
    if perplexity:
        at = math.exp(mean)
        of = (lambda x: at * (math.exp(x) - 1)) if against else (lambda x: at * math.exp(x))
        return measured(of(ours), of(ours - half), of(ours + half), n)
    if against:
        scale = 100 / mean if against == "gap" and mean else 100
        return measured(scale * ours, scale * (ours - half), scale * (ours + half), n)
    share, low, high = of_scores([line["score"] for line in own])
    return measured(100 * share, 100 * low, 100 * high, n)


def _title(place: Place, found: Found) -> str:
    row, column = place
    return f"{column}, {row}: {found.cells[place].mean:.0f} %" if place in found.cells else f"{column}, {row}"


def _map(lines: list[Line]) -> dict[Place, float]:
    """Return {(depth, length): mean score in per cent}."""

    def where(line: Line) -> tuple[float, int]:
        return line["tags"]["depth"], line["tags"]["length"]

    each = itertools.groupby(sorted(lines, key=where), where)
    return {(f"{depth:g}", f"{length}"): 100 * fmean(line["score"] for line in some) for (depth, length), some in each}


def size(session: Session, tables: list[Table]) -> tuple[int, int]:
    """Return how many (case, run) all tables of scores take, and how many of them are in files already."""
    all_runs: dict[Group, dict[RunSpec, None]] = {}
    for table in tables:
        for group, runs in groups(session, table).items():
            all_runs.setdefault(group, {}).update(runs)
    total = done = 0
    for group, runs in all_runs.items():
        total += len(runs) * group.size(session)
        if group.file(session).exists():
            lines = results.read(group.file(session))[1]
            done += sum(RunSpec(*(line[name] for name in vars(FULL))) in runs for line in lines)
    return total, done
