"""Evaluates policies, or a paper's protocol, on tasks. One JSON line per (case, run) is written as soon as it is known;
the first run of every case is `full`, the unpatched model."""

import contextlib
import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch.nn import Module
from tqdm import tqdm

from ...answering.answer import together
from ...asking.prompts import Tokenizer
from ...engine.memory import mapped
from ...models import families
from ...models.compat import cache_of
from ...models.families import device_of
from ...models.weights import fingerprint
from ...patch import find_decoder
from ...train.processes import Processes
from . import protocols
from .ask import AskedCase, ReadResult, ask, ask_together, encode, read
from .results import Line, Results
from .runs import FOUND, FULL, LAST, MODES, RunSpec, policy_for, reads_alone, specs
from .tasks import Case, TaskSettings, find
from .told import Progress, described
from .turns import converse


@dataclass(frozen=True)
class Evaluation:
    """The plan of an evaluation: every task at every length and seed, under every combination of policy, budget, chunk
    size and mode."""

    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    policies: tuple[str, ...]
    budgets: tuple[int | float | str, ...]
    chunk_sizes: tuple[int | str | None, ...] = (None,)
    modes: tuple[str, ...] = MODES[:2]
    seeds: tuple[int, ...] = (0,)
    cases: int = 20  # number of cases per length and seed, and per depth if the task has depths
    depths: tuple[float, ...] = TaskSettings.depths
    haystack: str | None = None
    data: str | None = None
    temperature: float | None = None  # sampling temperature; None: the likeliest token is taken
    protocol: str | None = None  # name of a paper's protocol, whose policies and chunk sizes replace those above
    adapter: str | None = None  # folder of a lookahead adapter, for a protocol that needs one
    draft: str | None = None  # folder of a smaller model that drafts, for a protocol that needs one
    question: str = LAST  # `FOUND` or `LAST`: what observes where the question is known

    def runs(self, layers: int = 1) -> list[RunSpec]:
        """List all runs, `full` first, for a model in which `layers` layers evict. Raises ValueError for a policy that
        is unknown, does not fit the budget, or recalls from a folder that cannot be written to."""
        if self.protocol is None:
            names = [name for name in self.policies if name != FULL.policy]
            runs = [FULL, *dict.fromkeys(specs(names, self.budgets, self.chunk_sizes, self.modes))]
        else:
            runs = protocols.runs(self.protocol, self.budgets, self.modes[0], layers, self.adapter, self.draft)
        for run in runs[1:]:
            mapped.check(policy_for(run, tokens=2**20, response=(0,)).run.archive)
        return runs

    def groups(
        self, tokenizer: Tokenizer | None
    ) -> list[tuple[Callable[[TaskSettings], Iterator[Case]], TaskSettings]]:
        """List (task function, its settings) for every seed, length and task."""
        haystack, data = (None if path is None else Path(path) for path in (self.haystack, self.data))
        return [
            (find(task), TaskSettings(tokenizer, length, self.cases, seed, self.depths, haystack, data))
            for seed in self.seeds for length in self.lengths for task in self.tasks
        ]  # fmt: skip


def evaluate(
    model: Module, tokenizer: Tokenizer, plan: Evaluation, out: str | Path, name: str = "", batch_size: int = 1,
    shared: tqdm | None = None,
) -> None:  # fmt: skip
    """Append all lines that the file `out` lacks, with a progress bar: `shared`, of which these lines are a part, or an
    own one. Processes that were launched together share the
    cases, and the first process writes the file. Up to `batch_size` questions about a text that was read once are asked
    together; the full cache is asked one by one. Raises ValueError if `out` was begun with another plan or model (its
    `name` and weights), and for a prompt longer than the model's context."""
    layers = families.layer_kinds(find_decoder(model).config).count(families.FULL_ATTENTION)
    runs, groups = plan.runs(layers), plan.groups(tokenizer)
    about = dict(model=name, layers=layers, weights=fingerprint(model), dtype=str(model.dtype))
    for task, settings in groups[: len(groups) // len(plan.seeds)]:  # so that an impossible plan fails at once
        for case in itertools.islice(task(settings), 1):
            encode(model, tokenizer, case)
            if "other" in plan.modes and not case.turn:
                raise ValueError(f"--mode other: {case.task} has no turns; give --tasks turns, or another mode")
    with contextlib.ExitStack() as stack:
        processes = Processes().join()
        first = processes.rank == 0
        if first and shared is None:
            told = described(about | dataclasses.asdict(plan), str(device_of(model)))
            print(f"{told}\n{len(runs)} runs of every case; results go to {out}", file=sys.stderr, flush=True)
        results = stack.enter_context(Results(out, about | dataclasses.asdict(plan))) if first else None
        keys, responses = processes.broadcast((results.keys, results.responses) if first else None)
        bar = stack.enter_context(Progress(first and shared is None))
        for done, (task, settings) in enumerate(groups):
            cases = list(task(settings))
            if len({case.id for case in cases}) < len(cases):
                raise ValueError(f"two cases of {cases[0].task} have the same id; give every case its own")
            bar.total = bar.n + len(cases) * len(runs) * (len(groups) - done)  # an estimate, if groups differ in size
            missing = {
                case.id: [r for r in runs if (case.task, case.id, settings.seed, *dataclasses.astuple(r)) not in keys]
                for case in cases
            }
            bar.skip(len(cases) * len(runs) - sum(map(len, missing.values())))

            def measure(text: list, missing: dict = missing, settings: TaskSettings = settings) -> Iterator[Line]:
                for case in text:
                    case.tags.setdefault("length", settings.length)
                wanted = {run: {case.id for case in text if run in missing[case.id]} for run in runs}
                return _lines(model, tokenizer, text, wanted, responses, settings.seed, plan, batch_size)

            texts = [list(group) for _, group in itertools.groupby(cases, lambda case: case.context)]
            texts = [text for text in texts if any(missing[case.id] for case in text)]
            bar.begin(sum(len(missing[case.id]) for case in texts[0]) if texts else 0)
            for line in processes.lines(texts, measure):
                results.write(line)
                (shared or bar).update()


def _lines(
    model: Module, tokenizer: Tokenizer, cases: list[Case], wanted: dict[RunSpec, set[str]], responses: dict, seed: int,
    plan: Evaluation, batch_size: int,
) -> Iterator[Line]:  # fmt: skip
    """Yield the line of every wanted run of cases with one context. `wanted` maps a run to the ids of the cases that
    lack it; `responses` maps (task, case id, seed) to the response of a full run that is known already. Runs that need
    only one read of the context come first."""
    asked = {}
    for case in cases:
        response = responses.get((case.task, case.id, seed))
        finds = plan.question == FOUND
        asked[case.id] = AskedCase(case, encode(model, tokenizer, case), seed, plan.temperature, response, finds)

    def line(case: Case, run: RunSpec, measured: Line) -> Line:
        about = dict(task=case.task, id=case.id, seed=seed, **dataclasses.asdict(run), metric=case.metric)
        return about | measured | dict(tags=case.tags)

    def alone(each: AskedCase, run: RunSpec, text: ReadResult | None = None) -> Line:
        measured = ask(model, tokenizer, each, run, text)
        each.response = measured.get("response", each.response)
        return line(each.case, run, measured)

    if cases[0].turn:
        for run, ids in wanted.items():
            conversation = converse(model, tokenizer, list(asked.values()), run) if ids else []
            yield from (line(case, run, measured) for case, measured in zip(cases, conversation) if case.id in ids)
        return
    once = [run for run, ids in wanted.items() if ids and len(cases) > 1 and reads_alone(run)]
    for run in once:
        mine = [each for id, each in asked.items() if id in wanted[run]]
        text = read(model, tokenizer, mine[0], run)
        alike = len({(each.case.one_line, bool(each.case.likelihood)) for each in mine}) == 1
        if batch_size == 1 or run == FULL or not alike or any(each.scored(run) is not None for each in mine):
            yield from (alone(each, run, text) for each in mine)
            continue
        lengths = [len(each.prompt.question) for each in mine]
        for batch in together(model, cache_of(text.out), lengths, batch_size):
            some = [mine[at] for at in batch]
            for each, measured in zip(some, ask_together(model, tokenizer, some, run, text), strict=True):
                yield line(each.case, run, measured)
    for id, each in asked.items():
        yield from (alone(each, run) for run, ids in wanted.items() if id in ids and run not in once)
