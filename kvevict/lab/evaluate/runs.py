"""Describes the ways to read and answer a case, and builds their policies.

A run is `full` (the unpatched model), or a policy at a budget that reads the prompt in one pass or in chunks. The run's
mode says whether the policy reads the question:

    known   the policy reads context and question as one prompt; if it evicts while decoding, it does so in this mode.
            If a case gives the question's place, the queries of the question's tokens score the slots
    later   the policy reads the context alone. The question and the answer follow, and all their tokens are kept: the
            budget is the context's. (An ordinary further turn would evict again, this time knowing the question.) A
            policy with recall=True reads the question too, and chooses the slots anew
    other   a control, for conversations: a turn is asked of the slots that were chosen for the turn before, and all
            tokens of the turn are kept. Then the policy reads the turn, as in `known`, and chooses the slots for the
            next turn
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.nn import Module

from ...patch import slot_bytes
from ...policy.building import Chosen, choose
from ...policy.checks import PLENTY, byte_count
from ...policy.policy import Policy
from ...policy.text import CALIBRATED, parse_policy

MODES = ("known", "later", "other")
ONE_PASS = 2**30  # a chunk size above every prompt's length
# What observes where the question is known: the question that `kvevict.patch` finds; or the prompt's last tokens and,
# where the task names its question, that
FOUND, LAST = "found", "last"
OWN = "own"  # in place of a chunk size: the policy's, with which `kvevict.patch` reads
KEEP_ALL = Policy(score="knorm", budget=2**30)
OBSERVERS = ("window", "probe", "recent")  # options, in tokens, that `policy_for` limits to half of the budget


@dataclass(frozen=True)
class RunSpec:
    """A way to read and answer a case, with one policy."""

    policy: str  # NAME or NAME:OPTION=VALUE,...
    budget: int | float | str | None = None
    chunk_size: int | None = None  # None: the prompt is read in one pass
    mode: str | None = None  # one of MODES; None for `full`


FULL = RunSpec("full")


def specs(
    policies: Iterable[str], budgets: Iterable[int | float | str], chunk_sizes: Iterable[int | str | None],
    modes: Iterable[str],
) -> Iterator[RunSpec]:  # fmt: skip
    """Yield the runs of every policy, budget, chunk size (`OWN`: the policy's) and mode. A policy that is a file of
    `kvevict calibrate` has its own budget and chunk size."""
    for name in policies:
        given = parse_policy(name)[1] if name.endswith(CALIBRATED) else {}
        own = [given["budget"]] if given else budgets
        sizes = [given["chunk_size"]] if given else [_chunks(name) if size == OWN else size for size in chunk_sizes]
        yield from itertools.starmap(RunSpec, itertools.product([name], own, sizes, modes))


def _chunks(policy: str) -> int | None:
    """Return a policy's own chunk size; None: it reads a prompt in one pass."""
    name, given = parse_policy(policy)
    return choose(name, **dict(given, budget=PLENTY, chunk_size=None)).policy.chunk_size


def options_of(policy: Policy) -> dict[str, Any]:
    """Collect the options of a policy's rows and score."""
    parts: Any = policy.rows, policy.score
    return {f.name: getattr(part, f.name) for part in parts for f in dataclasses.fields(part)}


def policy_for(
    run: RunSpec, tokens: int, response: Sequence[int], task: str = "eval", model: Module | None = None
) -> Chosen:
    """Build the policy of a run that reads `tokens` tokens. TADA keeps a separate history of each run and `task`, for
    as long as the process lives. A budget in bytes becomes slots of the model; without a model it stays in bytes.

    A window, probe or number of recent slots that the run's policy does not name is limited to half the budget. Rows
    that need the response's ids (the oracle's) get them; the prompt is then read in one pass, because the response's
    queries score the slots only after they have seen the whole prompt.
    """
    name, given = parse_policy(run.policy)
    if run.policy.endswith(CALIBRATED):
        del given["budget"], given["chunk_size"]
    if {"budget", "chunk_size"} & given.keys():
        raise ValueError(f"policy {run.policy!r}: give budget and chunk_size by --budgets and --chunk-size")
    ample, how = choose(name, budget=2**30, chunk_size=ONE_PASS, **given)
    budget: Any = run.budget
    if isinstance(budget, str) and model is not None:
        budget = max(1, byte_count("--budgets", budget) // slot_bytes(model, how.kv))
    slots = budget if isinstance(budget, int) else tokens if isinstance(budget, str) else math.ceil(budget * tokens)
    own = {option: size for option, size in options_of(ample).items() if option in OBSERVERS and isinstance(size, int)}
    options: dict[str, Any] = {option: min(size, max(1, slots // 2)) for option, size in own.items()}
    chunk, rows = run.chunk_size or ONE_PASS, ample.rows.with_response(response)
    if rows is not ample.rows:
        options["rows"], chunk = rows, ONE_PASS
    if hasattr(ample.layers, "task"):
        options["task"] = "/".join(map(str, (task, *dataclasses.astuple(run))))
    return choose(name, budget=budget, chunk_size=chunk, **options | given)


def reads_alone(run: RunSpec) -> bool:
    """Return whether a run reads a context in the same way for all questions, so that one read is enough."""
    if run == FULL or run.mode == "known":
        return run == FULL
    return policy_for(run, 1, (0,)).policy.rows == policy_for(run, 1, (1,)).policy.rows
