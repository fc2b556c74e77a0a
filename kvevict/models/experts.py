"""Experts of a mixture, called separately for the learned rows and for the others (METHODS section 6).

How many rows an expert multiplies may change how each product is rounded (another kernel, another order of summation).
The adapter influences the learned rows' routing, so in a common call it would change the other rows' bits.
"""

from typing import Any

import torch


def hooks(decoder: Any, rows: int, active: Any) -> Any:
    """Install hooks that call a mixture's experts separately for the last `rows` of every sequence, while active().
    Returns their handles."""
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
    """Hooks of one module of experts, called with rows [batch * T, E], the rows' experts and weights [.., k]."""

    def __init__(self, rows: int, active: Any) -> None:
        self.rows, self.active = rows, active
        self.shape: Any = None  # [batch, T] of the layer's input
        self.last: Any = None  # the last rows' output, [batch * rows, E]

    def note(self, layer: Any, args: Any, kwargs: Any) -> None:
        if self.active():
            self.shape = (args[0] if args else kwargs["hidden_states"]).shape[:2]

    def before(self, module: Any, args: Any) -> Any:
        """Call `forward` for the last rows, and return the arguments without them. A mixture that gives every expert
        every row passes another number of rows: it is left as it is, its products have one shape."""
        if not self.active() or self.shape[1] == self.rows or any(len(x) != self.shape.numel() for x in args):
            return None
        each = [x.unflatten(0, self.shape) for x in args]
        self.last = module.forward(*(x[:, -self.rows :].flatten(0, 1) for x in each))
        return tuple(x[:, : -self.rows].flatten(0, 1) for x in each)

    def after(self, module: Any, args: Any, output: Any) -> Any:
        if not self.active() or self.last is None:
            return None
        last, self.last = self.last, None
        return torch.cat([x.unflatten(0, (self.shape[0], -1)) for x in (output, last)], 1).flatten(0, 1)
