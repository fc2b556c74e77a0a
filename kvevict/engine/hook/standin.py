"""Replaces a method of a module by a function, and restores it. The replacement can be copied with the module."""

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch

from ...ops import few_rows

WRAPPED = "_kvevict_forward"  # attribute of a module with a replaced forward: the forward's `StandIn`
# Functions that torch.compile must not trace -> True if it must not trace the functions that they call either
UNTRACED: dict[Callable, bool] = {}

NO_RECORD = (
    "torch.export and torch.jit.trace record the operations of one call, and a patched model's differ from call to "
    "call: record it after kvevict.unpatch(model), or use torch.compile"
)


class StandIn:
    """The replacement of the method `name` of a module. A copy or pickle of the module gets a separate stand-in.

    function   called with the module, the original method and the call's arguments; None: the module is unpatched
    before     the attribute `name` that the module itself had before; None: the method was its class's
    """

    def __init__(self, function: Callable, module: torch.nn.Module, name: str, before: Callable | None) -> None:
        self.function, self.module, self.name, self.before = untraced(function), module, name, before

    def __call__(self, *args: object, **kwargs: object) -> Any:
        function = self.function
        if function is None or (function is few_rows.forward and torch.compiler.is_compiling()):
            # The module is unpatched, but a wrapper made before still calls this stand-in; or torch.compile traces the
            # call, and it cannot trace the property `own`.
            return self.before(*args, **kwargs) if self.before else self._of_class(self.module, *args, **kwargs)
        if torch.compiler.is_exporting():
            raise ValueError(NO_RECORD)
        return function(self.module, self.own, *args, **kwargs)

    def __getstate__(self) -> dict:
        """The state to pickle, with the function as it was before `untraced`: the wrapper that `torch.compiler.disable`
        returns cannot be pickled."""
        return self.__dict__ | dict(function=self.function and inspect.unwrap(self.function))

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self.function = untraced(self.function)

    @property
    def own(self) -> Callable:
        """The original method, bound to the module."""
        return self.before or types.MethodType(self._of_class, self.module)

    @property
    def _of_class(self) -> Callable:
        return getattr(type(self.module), self.name.removeprefix("_old_"))

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.own)

    @property
    def __code__(self) -> types.CodeType:
        return self.own.__code__  # torch.export reads a forward's `__code__`


def replace(module: torch.nn.Module, function: Callable) -> None:
    """Replace a module's `forward` by a stand-in that calls `function`. If accelerate has hooked the module, replace
    its `_old_forward`, which accelerate's hook calls."""
    name = "_old_forward" if "_old_forward" in module.__dict__ else "forward"
    standin = StandIn(function, module, name, module.__dict__.get(name))
    object.__setattr__(module, WRAPPED, standin)
    setattr(module, name, standin)


def restore(module: torch.nn.Module) -> None:
    """Restore the forward that a module had before `replace`."""
    standin = module.__dict__[WRAPPED]
    object.__delattr__(module, WRAPPED)
    standin.function = None
    name = standin.name
    if module.__dict__.get("_old_forward") is standin:  # accelerate has hooked the module after it was patched
        name = "_old_forward"
    if module.__dict__.get(name) is standin:
        setattr(module, name, standin.own)
        if standin.before is None and name == "forward":
            del module.__dict__[name]


@functools.cache
def untraced(function: Any) -> Any:
    """Wrap a function that is in `UNTRACED` so that torch.compile does not trace it; return any other function
    unchanged. A decorator at the function's definition would import Dynamo (torch.compile) with the package."""
    if function not in UNTRACED:
        return function
    return torch.compiler.disable(function, recursive=UNTRACED[function])
