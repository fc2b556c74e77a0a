import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ...store.files import write
from ..checks import at_least_0, count, flag, one_of, parsed
from ..inputs import Policy
from . import LAYERS, LayerBudget

UNTIL = ("attention", "layer", "off")
_histories = {}


@LAYERS.add("tada")
@dataclass(frozen=True)
class Tada(LayerBudget):
    """TADA (EDIE, eq. 12-18): slots in proportion to the layers' mean error over earlier contexts of the same task.

    task   names the history that is read and added to: `kvevict.history(task)`
    cd     the residual stream is compared after this part of a layer: "attention", "layer", or "off": not at all
    own    True: a prompt read chunk by chunk is split by its earlier chunks as soon as there are any, and not by
           earlier contexts

    A layer's error is the sum of its scores outside the window times the mean over the observing rows of
    1 - cos(R, R + O): how far the layer rotates the residual stream. The first context of a task has uniform layers
    or, read chunk by chunk, is split by its earlier chunks. Every batch row that loses slots is a context: the mean
    over its chunks. The next batch uses it.
    """

    task: str = "default"
    cd: str = "attention"
    own: bool = False
    measures: ClassVar[bool] = True

    @property
    def residual(self) -> str:
        return self.cd

    def check(self, policy: Policy) -> None:
        if not isinstance(self.task, str) or not self.task:
            raise TypeError(f"task must be the name of a task, got {self.task!r}")
        one_of("cd", self.cd, UNTIL)
        flag("own", self.own)

    def shares(self, policy: Policy, layers: int, tokens: int, measured: Any = None) -> list[float]:
        past = history(self.task)
        if past.contexts and len(past.errors) != layers:
            raise ValueError(
                f"the history of task {self.task!r} is of a model with {len(past.errors)} layers, not {layers}: give "
                "another task=, or reset it with kvevict.history(task).reset()"
            )
        if measured and (self.own or not past.contexts):
            return measured
        return past.errors or [1.0] * layers

    def learn(self, contexts: list[Any]) -> None:
        history(self.task).add(contexts)


class History:
    """The mean error of each layer over the `contexts` of one task, in `errors`.

    frozen   True: reads use it and leave it as it is
    """

    def __init__(self) -> None:
        self.frozen = False
        self.reset()

    def reset(self) -> None:
        self.contexts, self.errors = 0, []

    def add(self, contexts: list[Any]) -> None:
        """Add the errors per layer of further contexts to the means."""
        for errors in contexts if not self.frozen else ():
            if not all(map(math.isfinite, errors)):
                continue
            self.contexts += 1
            old = self.errors or [0.0] * len(errors)
            self.errors = [mean + (x - mean) / self.contexts for mean, x in zip(old, errors, strict=True)]

    def save(self, path: str | Path) -> None:
        write(path, json.dumps(dict(contexts=self.contexts, errors=self.errors)))

    def load(self, path: str | Path) -> None:
        """Read a file of `save`; raises ValueError for another kind of file."""
        try:
            with open(path, encoding="utf-8") as file:
                data = parsed(file.read())
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
    """Return TADA's history of a task: save(path), load(path), reset(), and `frozen` to stop learning."""
    return _histories.setdefault(task, History())
