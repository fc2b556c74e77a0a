"""Products of few rows, as those of decoded tokens, with 16-bit weights on a CPU: by `_ops.linear`, which reads each
weight once.

PyTorch gives them to oneDNN, which packs the weights anew at every call (docs/performance.md). While a patched model
decodes, `torch.nn.functional.linear` is the function of this module, which leaves other threads' calls to PyTorch. A
function that another library has put there stays.
"""

import platform
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from . import _ops

MEASURED = platform.machine().lower() in ("x86_64", "amd64")  # whether ours is known to be faster
HALVES = torch.bfloat16, torch.float16
MOST = 32  # rows: with more, torch's is as fast
FUNCTIONAL: Any = torch.nn.functional
TORCHS: Any = torch._C._nn.linear
_lock = threading.Lock()
_inside = 0  # calls of all threads


class _Here(threading.local):
    inside = 0  # calls of this thread


_here = _Here()


def of_call(model: torch.nn.Module, ids: Tensor | None, embeds: Tensor | None) -> AbstractContextManager[None]:
    """A context for a call of the model with ids [B, N] or embeddings [B, N, width]."""
    x = embeds if ids is None else ids
    few = MEASURED and x is not None and x.device.type == "cpu" and x.shape[:2].numel() <= MOST
    return _own() if few and next(model.parameters(), x).dtype in HALVES else nullcontext()


@contextmanager
def _own() -> Iterator[None]:
    global _inside
    with _lock:
        if FUNCTIONAL.linear is TORCHS:
            FUNCTIONAL.linear = linear
        _inside += 1
    _here.inside += 1
    try:
        yield
    finally:
        _here.inside -= 1
        with _lock:
            _inside -= 1
            if _inside == 0 and FUNCTIONAL.linear is linear:
                FUNCTIONAL.linear = TORCHS


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`: by `_ops.linear` for few rows in 16 bits, where no gradient is wanted."""
    if torch.compiler.is_compiling() or not _takes(input, weight, bias):
        return TORCHS(input, weight, bias)
    return _ops.linear(input, weight, bias) if input.ndim == 3 else _ops.linear(input[None], weight, bias)[0]


def _takes(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return (
        _here.inside > 0
        and all(each is None or _is_plain(each) for each in (x, weight, bias))
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
