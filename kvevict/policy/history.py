"""Keeps the mean errors of a model's layers over the prompts of a task, for the layer budget `tada`."""

import json
import math
from collections.abc import Iterable
from pathlib import Path

from ..store.files import write
from .checks import at_least_0, count, parsed

_histories: dict[str, "History"] = {}


class History:
    """The mean error of each layer, `errors`, over the contexts (prompts) of one task, whose number is `contexts`.

    frozen   True: reads use the means and do not change them
    """

    def __init__(self) -> None:
        self.frozen = False
        self.reset()

    def reset(self) -> None:
        self.contexts = 0
        self.errors: list[float] = []

    def add(self, contexts: Iterable[list[float]]) -> None:
        """Update the means with the layers' errors of further contexts. A context with an error that is not finite is
        left out."""
        for errors in contexts if not self.frozen else ():
            if not all(map(math.isfinite, errors)):
                continue
            self.contexts += 1
            old = self.errors or [0.0] * len(errors)
            self.errors = [mean + (x - mean) / self.contexts for mean, x in zip(old, errors, strict=True)]

    def save(self, path: str | Path) -> None:
        write(path, json.dumps(dict(contexts=self.contexts, errors=self.errors)))

    def load(self, path: str | Path) -> None:
        """Read a file that `save` wrote. Raises ValueError for any other file."""
        try:
            data = parsed(Path(path).read_text(encoding="utf-8"))
            contexts, errors = count("contexts", data["contexts"], 0), data["errors"]
            if not isinstance(errors, list) or bool(errors) != bool(contexts):
                raise ValueError("errors must have one number per layer, and none without contexts")
            for x in errors:
                at_least_0("an error", x)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is not a history ({error!r}); give a file that kvevict.history(task).save wrote"
            ) from None
        self.contexts, self.errors = contexts, [float(x) for x in errors]


def history(task: str = "default") -> History:
    """Return the `History` that the layer budget `tada` keeps of a task. It has save(path), load(path), reset(), and
    `frozen` to stop learning."""
    return _histories.setdefault(task, History())
