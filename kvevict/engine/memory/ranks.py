"""Tensor parallel: each of several processes, the ranks, has an equal part of every layer's heads, in order.

A rank decides alone about a single head. To compare heads, or to make one choice for all heads, every rank gathers the
scores of all heads, and so makes the same choice from the same scores. Every rank has the full hidden states.
"""

from functools import reduce
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, distributed

KEYS = ("k_proj", "qkv_proj", "query_key_value")  # names of modules whose split by columns splits the kv heads


class Ranks:
    """The ranks that share one model. A gather waits for all ranks, so all of them must call it."""

    def __init__(self, rank: int = 0, size: int = 1, group: Any = None) -> None:
        self.rank, self.size, self.group = rank, size, group

    def __deepcopy__(self, memo: object) -> "Ranks":
        return self  # a copy of the model runs in the same processes

    def mine(self, x: Any) -> Any:
        """Return this rank's heads of a tensor or array x [B, heads of all ranks, ..]."""
        part = x.shape[1] // self.size
        return x if self.size == 1 else x[:, self.rank * part : (self.rank + 1) * part]

    def gather(self, x: Tensor, columns: int | None = None, fill: int = 0) -> Tensor:
        """Concatenate all ranks' heads of x [B, heads of a rank, ..]. With `columns`, the last dimension of x is first
        padded to this size with `fill`."""
        if self.size == 1:
            return x
        if columns is not None:
            x = F.pad(x, (0, columns - x.shape[-1]), value=fill)
        return torch.cat(self._all(x), 1)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' x, added in rank order so that every rank gets the same sum."""
        return x if self.size == 1 else reduce(torch.add, self._all(x))

    def _all(self, x: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        distributed.all_gather(parts, x.contiguous(), group=self.group)
        return parts

    def objects(self, value: object) -> list:
        """Return every rank's value, in rank order. A value is any object that can be pickled."""
        values = [value] * self.size
        if self.size > 1:
            distributed.all_gather_object(values, value, group=self.group)
        return values

    def to_first(self, value: object) -> list | None:
        """Return every rank's value on the first rank, and None on the other ranks."""
        values = [value] * self.size if self.rank == 0 else None
        if self.size > 1:
            to = distributed.get_global_rank(self.group, 0)
            distributed.gather_object(value, values, dst=to, group=self.group)
        return values

    def counts(self, layer: Any) -> np.ndarray:
        """Return the slot counts of an `EvictionLayer`'s heads on all ranks: int [B, heads of all ranks], on the
        host."""
        if self.size == 1:
            return layer.counts
        first, heads = layer.counts[:, :1], self.size * layer.counts.shape[1]
        return first.repeat(heads, 1) if layer.head_offsets is None else first + layer.head_offsets

    def note(self, layer: Any, counts: np.ndarray) -> None:
        """Note that the heads of an `EvictionLayer` now hold counts [B, heads of all ranks] slots."""
        if self.size > 1:
            layer.head_offsets = counts - layer.counts[:, :1]


ALONE = Ranks()


def of(model: Any) -> Ranks:
    """Return the ranks that share a model's heads by Transformers' `tp_plan`, or `ALONE` if no heads are shared. Some
    plans leave all heads on every rank (Phi-3, OLMo 2): then every rank makes the same choice for all heads."""
    size, plan = getattr(model, "tp_size", None) or 1, getattr(model, "_tp_plan", None) or {}
    if size == 1 or not any(name.endswith(KEYS) and style == "colwise" for name, style in plan.items()):
        return ALONE
    mesh = model._device_mesh
    group = mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")
    return Ranks(distributed.get_rank(group), size, group)
