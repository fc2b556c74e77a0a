"""Tensor parallel: each of several processes, the ranks, has an equal part of every layer's heads, in order.

What concerns one head its rank does alone. What compares heads, or is one choice for all of them, every rank decides
from the numbers of all heads, which are gathered: the same numbers give the same choice everywhere. Hidden states are
whole on every rank.
"""

import torch
import torch.nn.functional as F
from torch import distributed


class Ranks:
    """The ranks that share one model. Whoever gathers waits for all others, so all of them must."""

    def __init__(self, rank=0, size=1, group=None):
        self.rank, self.size, self.group = rank, size, group

    def __deepcopy__(self, memo):  # processes are not copied
        return self

    def mine(self, x):
        """This rank's heads of x [B, heads of all ranks, ..]."""
        part = x.shape[1] // self.size
        return x if self.size == 1 else x[:, self.rank * part : (self.rank + 1) * part]

    def gather(self, x, columns=None, fill=0):
        """All ranks' heads of x [B, heads of a rank, ..]. columns: what the last dimension, which may differ from rank
        to rank, is to have, filled up with `fill`."""
        if self.size == 1:
            return x
        if columns is not None:
            x = F.pad(x, (0, columns - x.shape[-1]), value=fill)
        return torch.cat(self._all(x), 1)

    def sum(self, x):
        """The sum of all ranks' x, in rank order: the same on every rank."""
        return x if self.size == 1 else sum(self._all(x))

    def _all(self, x):
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        distributed.all_gather(parts, x.contiguous(), group=self.group)
        return parts

    def objects(self, value) -> list:
        """Every rank's value, of any kind that can be pickled."""
        values = [value] * self.size
        if self.size > 1:
            distributed.all_gather_object(values, value, group=self.group)
        return values

    def to_first(self, value):
        """Every rank's value on the first rank; None on the others."""
        values = [value] * self.size if self.rank == 0 else None
        if self.size > 1:
            to = distributed.get_global_rank(self.group, 0)
            distributed.gather_object(value, values, dst=to, group=self.group)
        return values

    def counts(self, layer):
        """int [B, heads of all ranks] slots that the heads of a layer hold, on the host."""
        if self.size == 1:
            return layer.counts
        first, heads = layer.counts[:, :1], self.size * layer.counts.shape[1]
        return first.repeat(heads, 1) if layer.head_offsets is None else first + layer.head_offsets

    def note(self, layer, counts) -> None:
        """A layer's heads have come to hold counts [B, heads of all ranks] slots."""
        if self.size > 1:
            layer.head_offsets = counts - layer.counts[:, :1]


ALONE = Ranks()


KEYS = ("k_proj", "qkv_proj", "query_key_value")


def of(model) -> Ranks:
    """Those that Transformers has split a model's heads over (`tp_plan`). There are plans that leave all heads on every
    rank (Phi-3, OLMo 2): each of those chooses for them all, and alike."""
    size, plan = getattr(model, "tp_size", None) or 1, getattr(model, "_tp_plan", None) or {}
    if size == 1 or not any(name.endswith(KEYS) and style == "colwise" for name, style in plan.items()):
        return ALONE
    mesh = model._device_mesh
    group = mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")
    return Ranks(distributed.get_rank(group), size, group)
