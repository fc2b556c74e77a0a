"""Linear layers with few rows, as of decoded tokens, and 16-bit weights on a CPU: `_ops.linear` reads each weight once,
where PyTorch calls oneDNN, which packs the weights anew in every call (docs/performance.md).

`forward` stands in for the forwards of a patched model's `torch.nn.Linear` modules; PyTorch itself is not changed.
Weights outside such a module, such as a router's, are left to PyTorch.
"""

import platform
from collections.abc import Callable

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ..context import context
from . import _ops

MEASURED = platform.machine().lower() in ("x86_64", "amd64")  # machines on which `_ops.linear` was measured as faster
HALVES = torch.bfloat16, torch.float16
MOST = 32  # rows; with more, PyTorch is as fast
TORCHS = torch.nn.functional.linear, torch.nn.Linear.forward  # PyTorch's own, which another library may replace


def has_few(model: torch.nn.Module, ids: Tensor | None, embeds: Tensor | None) -> bool:
    """Whether a call of the model with ids [B, N] or embeddings [B, N, E] has linear layers for `_ops.linear`."""
    x = embeds if ids is None else ids
    few = MEASURED and x is not None and x.device.type == "cpu" and x.shape[:2].numel() <= MOST
    return few and next(model.parameters(), x).dtype in HALVES


def is_product(module: torch.nn.Module) -> bool:
    """Whether `forward` may stand in for a module's forward."""
    return MEASURED and type(module) is torch.nn.Linear and module.weight.dtype in HALVES


def forward(module: torch.nn.Linear, run: Callable[..., Tensor], input: Tensor) -> Tensor:
    """Stand in for `run`, the forward of a `torch.nn.Linear`, with `_ops.linear` in a call that `has_few` rows."""
    if not context().few_rows:
        return run(input)
    weight, bias = module.weight, module.bias
    if not _takes(input, weight, bias) or not _is_torchs(run) or is_watched():
        return run(input)
    return _ops.linear(input, weight, bias) if input.ndim == 3 else _ops.linear(input[None], weight, bias)[0]


def _takes(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `_ops.linear` takes these tensors."""
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
    """Whether a tensor has no class of another library, lies on the CPU, and needs no gradient."""
    plain = type(x) in (Tensor, torch.nn.Parameter) and x.device.type == "cpu"
    return plain and not (x.requires_grad and torch.is_grad_enabled())


def _is_torchs(run: object) -> bool:
    """Whether a module's original forward, and the function that it calls, are PyTorch's own."""
    return (torch.nn.functional.linear, getattr(run, "__func__", None)) == TORCHS


def is_watched() -> bool:
    """Whether a function or dispatch mode of another library is on in this thread. PyTorch's mode that sets a device,
    and kvevict's, which note operators, do not count."""
    modes = *_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()
    return any(not type(mode).__module__.startswith(("kvevict.", "torch.utils._device")) for mode in modes)
