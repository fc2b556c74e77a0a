"""Processes that share work, started by torchrun or by `accelerate launch -m kvevict eval` (or `train --kind gates`).
The first process collects all results, so machines need no common disk. Launchers put a process's number into its
environment."""

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed

T = TypeVar("T")
Line = TypeVar("Line")


class Processes:
    """The `size` processes of this launch, of which this one is number `rank`. A process that no launcher started is
    alone. Every process calls `join` first, and all call the other methods in the same order."""

    def __init__(self) -> None:
        self.rank, self.size = (int(os.environ.get(name, alone)) for name, alone in (("RANK", 0), ("WORLD_SIZE", 1)))
        self.group = None  # None: torch's default group

    def join(self) -> "Processes":
        """Make torch's process group, if there are several processes and no group yet, and return self. The group
        stays: a later group of this launch would find its addresses in the launcher's store."""
        day = timedelta(days=1)  # the others wait until the slowest process has done its share
        if self.size > 1 and not distributed.is_initialized():
            distributed.init_process_group("gloo", timeout=day)
        elif self.size > 1:  # there is a group already, which may be for GPUs alone
            self.group = distributed.new_group(backend="gloo", timeout=day)
        return self

    def broadcast(self, value: T) -> T:
        """Return the first process's value in all processes."""
        if self.size == 1:
            return value
        box = [value]
        distributed.broadcast_object_list(box, group=self.group)
        return box[0]

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum all processes' tensors x of one shape, on x's device, with equal bits in all processes."""
        if self.size == 1:
            return x
        total = x.cpu().clone()
        distributed.all_reduce(total, group=self.group)
        return total.to(x.device)

    def lines(self, cases: Sequence[T], measure: Callable[[T], Iterator[Line]]) -> Iterator[Line]:
        """Yield the lines of the generator measure(case) for every case, each line as soon as it is known. Several
        processes take cases in turn, and the first of them yields all lines."""
        for start in range(0, len(cases), self.size):
            some = cases[start : start + self.size]
            if self.size == 1:
                yield from measure(some[0])
                continue
            mine = list(measure(some[self.rank])) if self.rank < len(some) else []
            found: Any = [None] * self.size if self.rank == 0 else None
            distributed.gather_object(mine, found, group=self.group)
            yield from itertools.chain(*found or [])
