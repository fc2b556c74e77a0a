"""Tells what an evaluation runs, and how far it is."""

import sys
import textwrap
import time
from collections.abc import Iterable

from tqdm import tqdm

from ...cautions import refresh_seconds
from .runs import FOUND, LAST, OWN

WIDTH = 120  # columns of a line
QUESTIONS = {
    FOUND: "The policy finds the question as `kvevict.patch` does.",
    LAST: "A probe is the prompt's last tokens, or the question where the task names it.",
}


def described(settings: dict, device: str = "") -> str:
    """Say what an evaluation with these settings, the first line of its file, runs."""
    dtype = str(settings["dtype"]).removeprefix("torch.")
    where = f"{settings['model'] or 'the model'}, {dtype}{f' on {device}' if device else ''}"
    what = [
        f"{where}; tasks {_listed(settings['tasks'])}, {settings['cases']} "
        f"case{'' if settings['cases'] == 1 else 's'} of each length, seed and depth; "
        f"lengths {_listed(settings['lengths'])}, seeds {_listed(settings['seeds'])}; "
        f"the question is {_listed(settings['modes'], ' or ')}."
    ]
    budgets = f"{_listed(settings['budgets'])} slots per kv head"
    if settings["protocol"]:
        what.append(f"The policies of protocol {settings['protocol']} with {budgets}, in the chunks of its paper.")
    else:
        what.append(f"Policies {_listed(settings['policies'])} with {budgets}, read in {_chunks(settings)}.")
    return textwrap.fill(" ".join([*what, QUESTIONS[settings["question"]]]), WIDTH - len("Ran: "))


def _listed(values: Iterable[object], between: str = ", ") -> str:
    return between.join(map(str, values))


def _chunks(settings: dict) -> str:
    named: dict[object, str] = {OWN: "the policy's own chunks, as `kvevict.patch` reads", None: "one pass"}
    return _listed((named.get(size, f"chunks of {size}") for size in settings["chunk_sizes"]), " and in ")


class Progress(tqdm):
    """A bar of runs with the time left; in a log it is written each half minute. Once the first text was measured, it
    says how long that took and how long the others take."""

    def __init__(self, shown: bool) -> None:
        # delay: no bar before the total is known
        super().__init__(desc="evaluating", unit="run", disable=not shown, mininterval=refresh_seconds(), delay=1e-9)
        self.start, self.first, self.measured = time.perf_counter(), 0, 0

    def skip(self, runs: int) -> None:
        """Count runs that are in the file."""
        super().update(runs)

    def begin(self, runs: int) -> None:
        """Note the number of runs of the next text that is measured."""
        self.first = self.first or runs

    def update(self, n: float | None = 1) -> bool | None:
        """Count a run that was measured."""
        self.measured += 1
        if self.measured == self.first and not self.disable:
            seconds = time.perf_counter() - self.start
            left = self.total - self.n - 1
            others = f", the others take about {_time(seconds * left / self.first)}" if left else ""
            self.write(f"the first text took {_time(seconds)}{others}", file=sys.stderr)
        return super().update(n)


def _time(seconds: float) -> str:
    minutes = seconds / 60
    return f"{seconds:.0f} s" if seconds < 100 else f"{minutes:.0f} min" if minutes < 100 else f"{minutes / 60:.1f} h"
