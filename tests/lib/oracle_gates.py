"""Gates (METHODS section 9) in float64: the part of `oracle.Row` for them."""

from functools import cache
from pathlib import Path

import safetensors.torch
import torch


@cache
def _tensors(folder):
    return {k: x.double() for k, x in safetensors.torch.load_file(Path(folder) / "gates.safetensors").items()}


def note(row, seen):
    """The tokens of a call, read or decoded, get their numbers, which stay with their slots."""
    tensors, at = _tensors(row.o["gates"]), f"{seen.index}."
    x = row.inputs[seen.index][: seen.new].double() @ tensors[at + "0.weight"].T + tensors[at + "0.bias"]
    if at + "1.weight" in tensors:
        x = x * (1 + torch.erf(x / 2**0.5)) / 2
        x = x @ tensors[at + "1.weight"].T + tensors[at + "1.bias"]
    for g, (slots, carry) in enumerate(zip(seen.layer.alive, seen.layer.carry)):
        carry.update(zip(slots[len(slots) - seen.new :], x[:, g].exp().tolist()))
