"""Calls the experts of a mixture separately for the rows of a LookaheadKV adapter and for the other rows (METHODS
section 6).

An adapter changes which experts its own rows go to, and so how many rows each expert gets. The number of rows may
change how an expert rounds each product (another kernel, another order of summation). Without separate calls the
adapter would therefore change the last bits of other rows.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Module


def hooks(decoder: Any, rows: int, active: Callable[[], bool]) -> list:
    """Install hooks that call the experts of each mixture in the decoder separately for the last `rows` rows of every
    sequence, whenever active() is true. Returns the hooks' handles."""
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
    """The hooks of a module of experts and its layer. The module's arguments are rows [batch * T, E], and for each row
    the indices and the weights of its k experts, [batch * T, k] each."""

    def __init__(self, rows: int, active: Callable[[], bool]) -> None:
        self.rows, self.active = rows, active
        self.shape: Any = None  # [batch, T] of the layer's input
        self.last: Any = None  # the experts' output for the last rows, [batch * rows, E]

    def note(self, layer: Module, args: tuple, kwargs: dict) -> None:
        if self.active():
            self.shape = (args[0] if args else kwargs["hidden_states"]).shape[:2]

    def before(self, module: Module, args: tuple) -> tuple | None:
        """Pre-hook of the experts: call their `forward` for the last rows, and return the arguments without these rows.
        A mixture that does not pass batch * T rows is left alone: it passes every row to every expert, so its products
        have the same shape in any call."""
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
