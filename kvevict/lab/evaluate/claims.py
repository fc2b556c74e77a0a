"""Tests a protocol's claims on results: for each claim the mean difference between its two sides over the same cases,
the mean's 95 % interval, and a verdict."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from ...commands import grid
from .intervals import student
from .protocols import PROTOCOLS, pairs
from .results import CASE, Line
from .runs import FULL, RunSpec
from .summary import FEW
from .tasks import FIDELITY, PERPLEXITY
from .told import WIDTH

SEEN, CONTRADICTED, OPEN = "yes", "no", "open"
FEWEST = 10  # fewest cases for a verdict
ANSWERS = "answers"  # kind of the scores of answers, in [0, 1]; the other kinds are metrics, in nats
UNITS = {ANSWERS: "points", FIDELITY: "nats of KL", PERPLEXITY: "nats a token"}


@dataclass(frozen=True)
class Difference:
    """The difference between a claim's two sides over cases: the mean, in the scores' unit and positive if the side
    `better` is better; the mean's 95 % interval; and the number of cases that each side won."""

    mean: float
    low: float
    high: float
    won: int
    lost: int
    cases: int

    def verdict(self, margin: float) -> str:
        """Judge whether the mean is above -margin: seen, contradicted, or open. The verdict is also open if there are
        fewer than `FEWEST` cases or none of them differs."""
        if self.cases < FEWEST or not self.won + self.lost:
            return OPEN
        return SEEN if self.low > -margin else CONTRADICTED if self.high < -margin else OPEN


def difference(values: Sequence[float], least: float = 0) -> Difference:
    """Compute the `Difference` from one number per case. The interval reaches Student's half width, or `least` if that
    is larger, to both sides of the mean. For scores `least` is 3 / n, the largest difference that n equal cases leave
    possible."""
    n, mean = len(values), sum(values) / len(values)
    half = max(least, student(values))
    return Difference(mean, mean - half, mean + half, sum(x > 0 for x in values), sum(x < 0 for x in values), n)


Scores = dict[tuple[tuple, RunSpec], float]  # {(case, run): score}


def scores(lines: list[Line], kind: str) -> Scores:
    """Collect {(case, run): score} from the lines of results, of one kind of score: a key of `UNITS`."""
    return {
        (tuple(line[name] for name in CASE), RunSpec(*(line[name] for name in vars(FULL)))): line["score"]
        for line in lines
        if (line["metric"] if line["metric"] in UNITS else ANSWERS) == kind
    }


def compared(known: Scores, sides: list[tuple[RunSpec, RunSpec]], kind: str) -> Difference | None:
    """Compare the two runs of a claim at each budget; `sides` has the two for each budget. A case's number is its mean
    difference over the budgets at which both were run, so that cases stay independent. Returns None if no case has both
    runs."""
    values, sign = [], 1 if kind == ANSWERS else -1
    for case in dict.fromkeys(case for case, _ in known):
        held = [(better, than) for better, than in sides if {(case, better), (case, than)} <= known.keys()]
        if held:
            apart = sum(known[case, better] - known[case, than] for better, than in held)
            values.append(sign * apart / len(held))
    return difference(values, least=3 / len(values) if kind == ANSWERS else 0) if values else None


def usual(known: Scores, sides: list[tuple[RunSpec, RunSpec]], kind: str) -> float:
    """Return the value of which a claim's margin is a share: for answers the full cache's mean score; in nats the mean
    of the runs `than` in `sides`, pairs (better, than), above the full cache's (whose divergence is 0), at least 0."""
    than = {both[1] for both in sides}
    full, own = ([score for (_, run), score in known.items() if run in runs] for runs in ({FULL}, than))
    base = sum(full) / len(full) if full and kind != FIDELITY else 0.0
    return base if kind == ANSWERS else max(0.0, sum(own) / len(own) - base) if own else 0.0


def render(
    lines: list[Line], name: str, budgets: Sequence[int], mode: str, layers: int,
    adapter: str | None = None, draft: str | None = None,
) -> str:  # fmt: skip
    """Make the list of a protocol's claims and the table of their numbers, with a row for each claim and kind of score
    (`UNITS`)."""
    table = [["claim", "of", "difference", "95 %", "won", "lost", "cases", "seen"]]
    kinds, said = {kind: scores(lines, kind) for kind in UNITS}, []
    for claim, sides in pairs(name, budgets, mode, layers, adapter, draft):
        rows = []
        for kind, known in kinds.items():
            found = compared(known, sides, kind)
            if found is None:
                continue
            margin, scale = (claim.margin or 0) * usual(known, sides, kind), 100 if kind == ANSWERS else 1
            interval = f"[{scale * found.low:+.3g}, {scale * found.high:+.3g}]" if found.cases >= FEW else "[few]"
            rows.append([
                UNITS[kind], f"{scale * found.mean:+.3g}", interval, str(found.won), str(found.lost), str(found.cases),
                found.verdict(margin),
            ])  # fmt: skip
        if rows:
            better, than = (run.policy for run in sides[0])
            said.append(textwrap.fill(f"{len(said) + 1}. {claim.says}: {better} against {than}", WIDTH,
                                      subsequent_indent="   ", break_on_hyphens=False))  # fmt: skip
            table += [[str(len(said)), *row] for row in rows]
    about = PROTOCOLS.find(name)
    cannot = [textwrap.fill(f"Not tested here: {line}", WIDTH) for line in about.cannot]
    parts = [about.paper, "\n".join(said), grid(table, left=len(table[0])), "\n".join([CAPTION, *cannot])]
    return "\n\n".join(part for part in parts if part)


CAPTION = (
    "difference: the mean over cases, each case's being its mean over the budgets; above 0 where the claim's side is\n"
    "better (nats of KL: nearer to the full cache; nats a token: the text is likelier). seen: yes, the interval\n"
    f"supports the claim; no, it contradicts it; open, it does neither, no case differs, or there are under {FEWEST}\n"
    f"([few]: under {FEW}). Claims of about as good allow for 5 % of the full cache's score, or of the divergence or\n"
    "nats above its own."
)
