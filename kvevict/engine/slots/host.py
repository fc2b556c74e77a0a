"""Numbers known to the host. Reading a number from a GPU tensor waits for all of the GPU's queued work, so the counts
that decide the launches are kept on the host too, as NumPy arrays."""

from typing import Any

import torch


def upload(numbers: Any, device: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """The host's numbers as a tensor on a device, without waiting for it."""
    return torch.tensor(numbers, dtype=dtype, device="cpu").to(device, non_blocking=True)
