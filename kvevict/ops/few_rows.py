"""Products of few rows, as those of decoded tokens, with 16-bit weights on a CPU: by `_ops.linear`, which reads each
weight once.

PyTorch gives them to oneDNN, which packs the weights anew at every call (docs/performance.md). `forward` stands in for
the forward of a patched model's `torch.nn.Linear` modules; nothing of PyTorch is replaced. What computes with weights
and without such a module, as a mixture's router, is left to PyTorch.
"""

import platform
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ..context import context
from . import _ops

MEASURED = platform.machine().lower() in ("x86_64", "amd64")  # whether ours is known to be faster
HALVES = torch.bfloat16, torch.float16
MOST = 32  # rows: with more, torch's is as fast
FUNCTIONAL: Any = torch.nn.functional
TORCHS = torch.nn.functional.linear, torch.nn.Linear.forward  # what another library may put its own in place of


def has_few(model: torch.nn.Module, ids: Tensor | None, embeds: Tensor | None) -> bool:
    """Whether a call of the model with ids [B, N] or embeddings [B, N, width] has products for `_ops.linear`."""
    x = embeds if ids is None else ids
    few = MEASURED and x is not None and x.device.type == "cpu" and x.shape[:2].numel() <= MOST
    return few and next(model.parameters(), x).dtype in HALVES


def is_product(module: torch.nn.Module) -> bool:
    """Whether `forward` may stand in for a module's forward."""
    return MEASURED and type(module) is torch.nn.Linear and module.weight.dtype in HALVES


def forward(module: Any, run: Callable[..., Tensor], input: Tensor) -> Tensor:
    """Stands in for `run`, the forward of a `torch.nn.Linear`: by `_ops.linear` in a call that `has_few`."""
    if not context().few_rows:
        return run(input)
    weight, bias = module.weight, module.bias
    if not _takes(input, weight, bias) or not _is_torchs(run) or is_watched():
        return run(input)
    return _ops.linear(input, weight, bias) if input.ndim == 3 else _ops.linear(input[None], weight, bias)[0]


def _takes(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return (
        all(each is None or _is_plain(each) for each in (x, weight, bias))
        and x.ndim in (2, 3)
        and x.dtype in HALVES
        and weight.dtype == x.dtype
        and x.shape[-1] % 32 == 0
        and x.numel() <= MOST * x.shape[-1]
        and weight.ndim == 2
        and weight.is_contiguous()
        and (bias is None or (bias.shape == weight.shape[:1] and bias.is_contiguous()))
        and not torch.is_autocast_enabled("cpu")
    )


def _is_plain(x: Tensor) -> bool:
    """Whether a tensor is not a subclass, lies on the CPU and has no gradient to come."""
    plain = type(x) in (Tensor, torch.nn.Parameter) and x.device.type == "cpu"
    return plain and not (x.requires_grad and torch.is_grad_enabled())


def _is_torchs(run: Any) -> bool:
    """Whether a module's own forward is PyTorch's, as is the function that it calls."""
    return (FUNCTIONAL.linear, getattr(run, "__func__", None)) == TORCHS


def is_watched() -> bool:
    """Whether a mode of another library sees what this thread calls. One that chooses a device sees no products, and
    those of kvevict note operators."""
    modes = *_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()
    return any(not type(mode).__module__.startswith(("kvevict.", "torch.utils._device")) for mode in modes)
