"""A run of `kvevict papers`: the model, the sizes, where results go, and how far it is."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch.nn import Module
from tqdm import tqdm

from ...asking.prompts import Tokenizer
from ...models.families import FULL_ATTENTION, context_of, find_decoder, heads, layer_kinds
from ...models.weights import fingerprint
from ...store import files
from ..evaluate.ask import encode
from ..evaluate.protocols import words
from ..evaluate.runs import FULL, RunSpec, policy_for
from ..evaluate.tasks import TASKS, Case, TaskSettings
from . import Found, Setting, Table, Value

PROBE = 64  # tokens that each policy reads before a table is begun, to find those that this model refuses


@dataclass
class Session:
    """What all tables of a run share.

    lengths   tokens of prompts; the last is the longest
    cases     made-up cases of each task at each length and depth
    texts     prompts on which slots are compared
    repeat    runs of each timing
    """

    name: str
    model: Module
    tokenizer: Tokenizer
    out: Path
    lengths: tuple[int, ...]
    cases: int
    texts: int
    repeat: int
    bundled: bool = False
    haystack: str | None = None
    data: str | None = None
    adapter: str | None = None
    draft: str | None = None
    bar: tqdm | None = None
    notes: list[str] = field(default_factory=list)  # of the table that is being measured
    refused: dict[RunSpec, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.config = find_decoder(self.model).config
        self.layers = layer_kinds(self.config).count(FULL_ATTENTION)
        self.kv_heads = heads(self.config)[1]
        self.context = context_of(self.config)
        self.about = dict(
            model=self.name, weights=fingerprint(self.model), dtype=str(self.model.dtype), lengths=list(self.lengths),
            cases=self.cases, texts=self.texts, repeat=self.repeat, haystack=self.haystack, data=self.data,
            adapter=self.adapter, draft=self.draft,
        )  # fmt: skip

    def begin(self) -> None:
        """Note the settings in the folder. Raises ValueError if it was begun with others."""
        path, now = self.out / "settings.json", json.loads(json.dumps(self.about))
        before = json.loads(path.read_text("utf-8")) if path.exists() else now
        if differs := [
            f"{name} was {before.get(name)}, is {now[name]}" for name in now if now[name] != before.get(name)
        ]:
            raise ValueError(f"{self.out} was begun with other settings: {'; '.join(differs)}; give another --out")
        self.out.mkdir(parents=True, exist_ok=True)
        files.write(path, json.dumps(now))

    def step(self, count: int = 1) -> None:
        if self.bar is not None:
            self.bar.update(count)

    def run_of(self, cell: Setting) -> RunSpec:
        """Return how a cell's prompts are read."""
        if cell["policy"] == FULL.policy:
            return FULL
        budget, names = cell["budget"], words(cell["budget"], self.layers, self.adapter, self.draft)
        return RunSpec(cell["policy"].format(**names), budget, cell.get("chunk"), "known")

    def usable(self, run: RunSpec) -> bool:
        """Return whether the model can be read under a run's policy; a refusal's reason becomes a note."""
        if isinstance(run.budget, int) and run.budget >= self.lengths[-1]:
            self.notes += [f"Left out are {run.budget} slots: prompts have {self.lengths[-1]} tokens at most."]
            return False
        if run not in self.refused:
            self.refused[run] = self._reason(run)
        if reason := self.refused[run]:
            note = f"Left out is {run.policy}: {reason}"
            self.notes += [note] if note not in self.notes else []
        return not reason

    def _reason(self, run: RunSpec) -> str:
        from ...patch import evicting

        if run == FULL:
            return ""
        if "draft_model=None" in run.policy:
            return "give a smaller model of the same tokenizer by --draft."
        try:
            chosen = policy_for(run, PROBE, (0,), model=self.model).with_tokenizer(self.tokenizer)
            ids = torch.zeros(1, PROBE, dtype=torch.long, device=next(self.model.parameters()).device)
            with torch.no_grad(), evicting(self.model, chosen, tokenizer=False):
                self.model(ids, use_cache=True, logits_to_keep=1)
        except (ValueError, TypeError, OSError) as error:
            return f"{' '.join(str(error).split())}."
        return ""

    def asked(self, task: str, count: int, length: int) -> list[tuple[torch.Tensor, Case]]:
        """Return (ids [1, N], case) of `count` prompts of a task, each of at most `length` tokens with the question."""
        haystack = None if self.haystack is None else Path(self.haystack)
        settings = TaskSettings(self.tokenizer, length, count, depths=(0.5,), haystack=haystack)
        device, cases = next(self.model.parameters()).device, TASKS.find(task)(settings)
        return [(encode(self.model, self.tokenizer, case).row(device), case) for case in cases]

    def prompts(self, count: int | None = None, length: int | None = None) -> list[torch.Tensor]:
        """Return ids [1, N] of `count` prompts (by default `texts`) of `length` tokens (by default the longest)."""
        return [ids for ids, _ in self.asked("facts", count or self.texts, length or self.lengths[-1])]


Measure = Callable[[Session, Table], Found]


def kept(measure: Measure) -> Measure:
    """Decorate a table's measure: numbers that an earlier run of the same cells and settings has written are read."""

    @functools.wraps(measure)
    def run(session: Session, table: Table) -> Found:
        path = session.out / "measured" / f"{table.name}.json"
        known = json.loads(json.dumps(dict(about=session.about, cells=[table.rows, table.columns, table.common])))
        if path.exists():
            before = json.loads(path.read_text("utf-8"))
            if before["known"] == known:
                return _unpacked(before["found"])
        found = measure(session, table)
        found.notes += session.notes
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, json.dumps(dict(known=known, found=_packed(found))))
        return found

    return run


def _packed(found: Found) -> dict[str, object]:
    maps = {title: [[*place, value] for place, value in each.items()] for title, each in found.maps.items()}
    return dict(cells=[[*place, asdict(value)] for place, value in found.cells.items()], maps=maps, notes=found.notes)


def _unpacked(packed: dict) -> Found:
    maps = {title: {(y, x): value for y, x, value in each} for title, each in packed["maps"].items()}
    return Found({(row, column): Value(**value) for row, column, value in packed["cells"]}, maps, packed["notes"])
