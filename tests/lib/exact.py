"""The arithmetic of a model in float64, and how far float32 may be from it on any processor.

Transformers computes norms, softmax and rotations in float32 whatever the model's dtype is; within `Exact` everything
is float64. `Exact(seed)` is one draw of float32's rounding: every result is off by a random relative error of the size
of float32's. The error of a full computation depends on its condition, so a multiple of eps cannot bound it; a few
draws measure it without float32, and so without a processor's order of summation:

- a function of one element, and a copy: its value times 1 + u z, u = 2^-24, z normal;
- a sum of n products a_i b_i: u sqrt(n) sqrt(sum (a_i b_i)^2) z. Summed in any order, product i is in at most n partial
  sums and so has at most n roundings, each at most u and of either sign: about sqrt(n) u together.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

U = 2.0**-24
aten = torch.ops.aten


class Exact(TorchDispatchMode):
    """Within, casts to float32 give float64, forward and backward; with a seed, results are rounded as described."""

    def __init__(self, seed=None):
        super().__init__()
        self.generator = None if seed is None else torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        out = func(*args, **kwargs)
        new = all(returned.alias_info is None for returned in func._schema.returns)  # no view, nothing in place
        if self.generator is not None and new and isinstance(out, torch.Tensor) and out.dtype == torch.float64:
            size = self._size(func, args, out).masked_fill_(out.abs() > 1e30, 0)  # masks
            out += U * size * torch.randn(out.shape, generator=self.generator, dtype=out.dtype)
        return out

    @staticmethod
    def _size(func, args, out):
        """[like out] the factor of u z."""
        if func in (aten.mm.default, aten.bmm.default, aten.addmm.default):
            a, b = args[-2:]
            return a.shape[-1] ** 0.5 * (a.square() @ b.square()).sqrt()
        if func in (aten.sum.default, aten.sum.dim_IntList, aten.mean.dim):
            return (args[0].numel() / out.numel()) ** 0.5 * out.abs()
        return out.abs()


def spread(compute, draws):
    """({name: exact tensor}, {name: norm}) for a `compute()` that returns {name: tensor}. The norm is the largest
    distance over some draws that float32's rounding moves a tensor."""
    with Exact():
        exact = compute()
    moved = dict.fromkeys(exact, 0.0)
    for seed in range(draws):
        with Exact(seed):
            found = compute()
        moved = {name: max(moved[name], (found[name] - exact[name]).norm().item()) for name in exact}
    return exact, moved
