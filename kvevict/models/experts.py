"""Calls the experts of a mixture separately for a LookaheadKV adapter's rows and for the others (METHODS section 6).

The number of rows that an expert multiplies may change how each product is rounded (another kernel, another order of
summation). The adapter changes how its own rows are routed, so in a common call it would change other rows' bits.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Module


def hooks(decoder: Any, rows: int, active: Callable[[], bool]) -> list:
    """Install hooks that call a mixture's experts separately for the last `rows` rows of every sequence, while active()
    is true. Returns the hooks' handles."""
    found = []
    for layer in decoder.layers:
        for name, module in layer.named_modules():
            if name.rpartition(".")[2] == "experts":
                separate = _Separate(rows, active)
                found += [
                    layer.register_forward_pre_hook(separate.note, with_kwargs=True),
                    module.register_forward_pre_hook(separate.before),
                    module.register_forward_hook(separate.after),
                ]
    return found


class _Separate:
    """Hooks of a module of experts, whose arguments are rows [batch * T, E] and each row's experts and weights [..,
    k]."""

    def __init__(self, rows: int, active: Callable[[], bool]) -> None:
        self.rows, self.active = rows, active
        self.shape: Any = None  # [batch, T] of the layer's input
        self.last: Any = None  # the last rows' output, [batch * rows, E]

    def note(self, layer: Module, args: tuple, kwargs: dict) -> None:
        if self.active():
            self.shape = (args[0] if args else kwargs["hidden_states"]).shape[:2]

    def before(self, module: Module, args: tuple) -> tuple | None:
        """Call `forward` for the last rows, and return the arguments without these rows. A mixture in which every
        expert gets every row passes another number of rows. Its products have one shape, so it is left alone."""
        if not self.active() or self.shape[1] == self.rows or any(len(x) != self.shape.numel() for x in args):
            return None
        each = [x.unflatten(0, self.shape) for x in args]
        self.last = module.forward(*(x[:, -self.rows :].flatten(0, 1) for x in each))
        return tuple(x[:, : -self.rows].flatten(0, 1) for x in each)

    def after(self, module: Module, args: tuple, output: torch.Tensor) -> torch.Tensor | None:
        if not self.active() or self.last is None:
            return None
        last, self.last = self.last, None
        return torch.cat([x.unflatten(0, (self.shape[0], -1)) for x in (output, last)], 1).flatten(0, 1)
