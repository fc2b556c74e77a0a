"""Numbers that the host knows. Whoever asks a tensor on a GPU for a number waits for all that the GPU has yet to do, so
counts that decide what is launched are kept on the host too, as NumPy arrays."""

import torch


def upload(numbers, device, dtype=torch.int64):
    """The host's numbers as a tensor on a device, which is not waited for."""
    return torch.tensor(numbers, dtype=dtype, device="cpu").to(device, non_blocking=True)
