"""Products of a decoded token's one row with weights in bf16, on x86.

PyTorch gives them to oneDNN, which packs the weights anew at every call. Its own loop reads each weight once, in half
of the time (docs/performance.md). The choice is a setting of the process, so all threads have it while one decodes.
"""

import platform
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

X86 = platform.machine().lower() in ("x86_64", "amd64")
ONEDNN: Any = torch.backends.mkldnn
_lock = threading.Lock()
_inside = 0  # threads that decode a token
_before = True  # the setting that they found


def of_call(
    model: torch.nn.Module, ids: torch.Tensor | None, embeds: torch.Tensor | None
) -> AbstractContextManager[None]:
    """A context for a call of the model with ids [B, N] or embeddings [B, N, width]."""
    x = embeds if ids is None else ids
    one = X86 and x is not None and x.shape[:2] == (1, 1) and x.device.type == "cpu"
    return _without_packing() if one and next(model.parameters(), x).dtype == torch.bfloat16 else nullcontext()


@contextmanager
def _without_packing() -> Iterator[None]:
    global _inside, _before
    with _lock:
        if _inside == 0:
            _before = ONEDNN.enabled
            ONEDNN.enabled = False
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                ONEDNN.enabled = _before
