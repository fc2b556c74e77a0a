"""Faster linear layers on a CPU for 16-bit weights and few rows, as when tokens are decoded. `_ops.linear` reads each
weight once, whereas PyTorch calls oneDNN, which packs the weights anew in every call (docs/performance.md).

`forward` stands in for the forwards of a patched model's `torch.nn.Linear` modules; PyTorch itself is not changed.
Weights outside such modules, for example a router's, are left to PyTorch.
"""

import platform
from collections.abc import Callable

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ..context import context
from . import _ops

MEASURED = platform.machine().lower() in ("x86_64", "amd64")  # True where `_ops.linear` was measured to be faster
HALVES = torch.bfloat16, torch.float16
MOST = 32  # the largest number of rows; with more rows PyTorch is as fast
TORCHS = torch.nn.functional.linear, torch.nn.Linear.forward  # PyTorch's functions; another library may replace them


def has_few(model: torch.nn.Module, ids: Tensor | None, embeds: Tensor | None) -> bool:
    """Whether `_ops.linear` should compute the linear layers in a call of the model with ids [B, N] or embeddings
    [B, N, E]: a call with few rows (B * N), on a CPU, of a model with 16-bit weights."""
    x = embeds if ids is None else ids
    few = MEASURED and x is not None and x.device.type == "cpu" and x.shape[:2].numel() <= MOST
    return few and next(model.parameters(), x).dtype in HALVES


def is_product(module: torch.nn.Module) -> bool:
    """Whether a module is a linear layer whose forward `forward` may replace."""
    return MEASURED and type(module) is torch.nn.Linear and module.weight.dtype in HALVES


def forward(module: torch.nn.Linear, run: Callable[..., Tensor], input: Tensor) -> Tensor:
    """Take the place of `run`, the forward of a `torch.nn.Linear`. `_ops.linear` computes the product if the running
    call of the model has few rows and the op supports these tensors; otherwise `run` does."""
    if not context().few_rows:
        return run(input)
    weight, bias = module.weight, module.bias
    if not _takes(input, weight, bias) or not _is_torchs(run) or is_watched():
        return run(input)
    return _ops.linear(input, weight, bias) if input.ndim == 3 else _ops.linear(input[None], weight, bias)[0]


def _takes(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `_ops.linear` supports these tensors: their dtypes, shapes, strides and device."""
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
    """Whether x is an ordinary tensor or parameter (not a subclass of another library) on the CPU without gradients."""
    plain = type(x) in (Tensor, torch.nn.Parameter) and x.device.type == "cpu"
    return plain and not (x.requires_grad and torch.is_grad_enabled())


def _is_torchs(run: object) -> bool:
    """Whether `run`, a linear module's original forward, and the `linear` that it calls are PyTorch's own functions."""
    return (torch.nn.functional.linear, getattr(run, "__func__", None)) == TORCHS


def is_watched() -> bool:
    """Whether a torch function mode or dispatch mode of another library is active in this thread. PyTorch's mode that
    sets a default device, and kvevict's modes, which record operators, are ignored."""
    modes = *_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()
    return any(not type(mode).__module__.startswith(("kvevict.", "torch.utils._device")) for mode in modes)
