"""The files of a downloaded benchmark, in the folder `settings.data`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...policy.checks import parsed

if TYPE_CHECKING:
    from .tasks import Settings


def files(settings: Settings, task: str, origin: str, *patterns: str) -> list[Path]:
    """The files in `settings.data`, or in its subfolder with the benchmark's name, that match the first of the patterns
    that any match. ValueError if none does."""
    wanted = f"the folder that holds {patterns[0]} ({origin})"
    if settings.data is None:
        raise ValueError(f"data: {task} reads a downloaded benchmark; give {wanted}")
    for pattern in (*patterns, *(f"{task.split('/')[0]}/{pattern}" for pattern in patterns)):
        if found := sorted(Path(settings.data).glob(pattern)):
            return found
    raise ValueError(f"data: {task} found no {' or '.join(patterns)} in {settings.data}; give {wanted}")


def read_jsonl(path: Path) -> list[dict]:
    """Records, one a line, of a file."""
    return [parsed(row) for row in path.read_text("utf-8").split("\n") if row.strip()]


def drawn(settings: Settings, name: str, records: list) -> list[tuple[int, Any]]:
    """`settings.cases` pairs (place, record) in an order that depends on the seed alone; all, if there are fewer."""
    if not records:
        raise ValueError(f"data: {name} found no records in {settings.data}; give other files")
    return settings.rng(name).sample(list(enumerate(records)), len(records))[: settings.cases]
