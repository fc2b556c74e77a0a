"""Runs a paper's tables one by one: tells what it will do, goes on where an earlier run ended, and writes each table as
soon as it is known."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from ...policy.checks import installed
from . import Paper, Table, write
from .scores import groups, scores, size
from .session import Session
from .speed import COMPUTED


def chosen(paper: Paper, only: list[str]) -> tuple[list[Table], dict[str, str]]:
    """Return the tables that `only` names (all if it is empty), and {name: why it is not run} for other names. Raises
    ValueError if no table is left."""
    known = {table.name: table for table in paper.tables}
    failed = {}
    for name in only:
        if name not in known:
            failed[name] = paper.cannot.get(name, f"there is no such table; there are {', '.join(known)}")
    tables = [table for name, table in known.items() if not only or name in only]
    if not tables:
        raise ValueError("; ".join(f"--only {name}: {reason}" for name, reason in failed.items()))
    return tables, failed


def lacking(session: Session, table: Table) -> str:
    """Return the reason why a table says nothing about this model; "" if it does."""
    if session.layers < table.layers:
        return f"it needs {table.layers} layers that evict, the model has {session.layers}"
    if session.kv_heads < table.kv_heads:
        return f"it needs {table.kv_heads} kv heads, the model has {session.kv_heads}"
    return ""


def run(session: Session, paper: Paper, only: list[str]) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Make tables. Returns {table: its files} and {table: why it is not there}."""
    tables, failed = chosen(paper, only)
    failed |= {table.name: reason for table in tables if (reason := lacking(session, table))}
    tables = [table for table in tables if table.name not in failed]
    drawn = _can_draw()
    total, done = told(session, paper, tables, failed)
    made: dict[str, list[str]] = {}
    with tqdm(total=total, initial=done, desc="papers", unit="run", disable=None) as session.bar:
        for number, table in enumerate(tables, 1):
            session.bar.set_postfix_str(f"{table.name}, {number} of {len(tables)}")
            session.notes, start = [], time.perf_counter()
            try:
                found = table.measure(session, table)
                if not found.cells:
                    raise ValueError(" ".join(found.notes or session.notes) or "no cell of it can be measured")
                found.notes = [*dict.fromkeys(found.notes + session.notes)]
                made[table.name] = write.table(session.out, table, found, drawn)
                said = f"{', '.join(made[table.name])} ({time.perf_counter() - start:.0f} s)"
            except (ValueError, TypeError, OSError, RuntimeError) as error:  # RuntimeError: a GPU's memory is full
                failed[table.name] = said = " ".join(str(error).split())
            if table.measure is not scores:
                session.step(_runs(session, table))
            session.bar.write(f"{table.name}: {said}")
            write.index(session.out, paper, session, made, failed)
    return made, failed


def _can_draw() -> bool:
    try:
        installed("plot", "pictures of tables", "matplotlib")
    except (ImportError, ValueError) as error:
        print(f"No pictures: {error}", file=sys.stderr)
        return False
    return True


def _runs(session: Session, table: Table) -> int:
    """Return about how many prompts are read for a table."""
    if table.measure is scores:
        return sum(len(runs) * group.size(session) for group, runs in groups(session, table).items())
    return 0 if table.measure in COMPUTED else len(table.columns) * session.texts


def told(session: Session, paper: Paper, tables: list[Table], failed: dict[str, str]) -> tuple[int, int]:
    """Print what will be run and about how long it takes, by the time of one answer with the full cache. Returns the
    number of runs, and how many of them an earlier call has measured."""
    of_scores = [table for table in tables if table.measure is scores]
    total, done = size(session, of_scores)
    print(f"{paper.title}: {len(tables)} tables and figures with {Path(session.name).name}, into {session.out}")
    for table in tables:
        print(f"  {table.name:9} {_runs(session, table):5} runs  {write.title(table).partition(': ')[2]}")
    for name, reason in failed.items():
        print(f"  {name:9} left out: {reason}")
    total += sum(_runs(session, table) for table in tables if table not in of_scores)
    (ids,) = session.prompts(1)
    generate: Callable[..., object] = getattr(session.model, "generate")  # noqa: B009
    generate(ids[:, :8], attention_mask=ids.new_ones(1, 8), max_new_tokens=2)
    start = time.perf_counter()
    generate(ids, attention_mask=ids.new_ones(ids.shape), max_new_tokens=16, do_sample=False)
    seconds = time.perf_counter() - start
    left = total - done
    print(
        f"{left} runs are to be made, {done} are known; one of {ids.shape[1]} tokens took {seconds:.1f} s: about "
        f"{left * seconds / 60 + 0.5:.0f} min. Ctrl-C stops, the same command goes on."
    )
    return total, done
