"""Papers' claims about their methods, as comparisons that `kvevict eval --protocol NAME` repeats on any model. A file
for each paper registers its `Protocol`.

A comparison changes one thing, gives both sides the same cases, and pairs them case by case.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ....policy.registry import Registry, load_folder
from ..runs import FULL, RunSpec
from ..tasks import FIDELITY

PROTOCOLS = Registry("protocol", listed=True)
TASKS = ("facts", "keyvalue", FIDELITY)  # the default of --tasks
ONE_PASS = None


@dataclass(frozen=True)
class Claim:
    """A claim that `better` answers better than `than`; with a margin, that `better` is not worse by more than this
    share of the full cache's score.

    better, than   policies, NAME or NAME:OPTION=VALUE,... with words in braces: {B} and {B20} are the budget and 20
                   times the budget; {L4}, {L2}, {L34} and {L} a quarter, half, three quarters and all of the layers
                   that evict; {adapter} or, after other options, {and_adapter} the option that names --adapter; {draft}
                   the folder of --draft (without --draft the claim is left out)
    chunks         tokens read at once by each of the two; None: the prompt is read in one pass
    least          smallest budget that can test it, in slots
    layers         fewest evicting layers of a model that can test it
    """

    says: str  # the paper's claim, with its place
    better: str
    than: str
    margin: float | None = None
    chunks: tuple = (ONE_PASS, ONE_PASS)
    least: int = 0
    layers: int = 1

    def runs(self, budget: int, mode: str, names: dict[str, object]) -> tuple[RunSpec, ...]:
        """Return the `RunSpec`s of both sides; `names` has the values of the words in braces."""
        sides = zip((self.better, self.than), self.chunks)
        return tuple(RunSpec(policy.format(**names), budget, chunk, mode) for policy, chunk in sides)


@dataclass(frozen=True)
class Protocol:
    """A paper's claims, and remarks about claims that cannot be tested here and about differences from the paper."""

    paper: str
    claims: tuple
    cannot: tuple = ()


def each(says: str, policies: Iterable[str], than: str, **options: Any) -> list[Claim]:
    """Make a claim for every policy; {better} and {than} in the text are the two sides."""
    return [Claim(says.format(better=better, than=than), better, than, **options) for better in policies]


def names(budget: int, layers: int, adapter: str | None, draft: str | None) -> dict[str, object]:
    return dict(
        B=budget, B20=20 * budget, L4=max(1, layers // 4), L2=max(1, layers // 2),
        L34=max(1, 3 * layers // 4), L=layers, adapter=f":adapter={adapter}" if adapter else "",
        and_adapter=f",adapter={adapter}" if adapter else "", draft=draft,
    )  # fmt: skip


def pairs(
    name: str, budgets: Iterable[int], mode: str, layers: int, adapter: str | None = None, draft: str | None = None
) -> list[tuple[Claim, list[tuple[RunSpec, RunSpec]]]]:
    """List (claim, its two runs at each budget that can test it) of a protocol. With few layers some shares of the
    layers are equal; a claim whose sides are then equal is left out."""
    found = []
    for claim in PROTOCOLS.find(name).claims:
        if layers >= claim.layers and (draft or "{draft}" not in claim.better + claim.than):
            held = [budget for budget in budgets if budget >= claim.least]
            sides = [claim.runs(budget, mode, names(budget, layers, adapter, draft)) for budget in held]
            found.append((claim, [(better, than) for better, than in sides if better != than]))
    return [(claim, sides) for claim, sides in found if sides]


def runs(*args: Any) -> list[RunSpec]:
    """List every run of a protocol once, `full` first; takes the arguments of `pairs`."""
    return [FULL, *dict.fromkeys(run for _, sides in pairs(*args) for both in sides for run in both)]


load_folder(__name__)
