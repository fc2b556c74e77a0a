"""Shares work among processes that torchrun or `accelerate launch -m kvevict eval` (or `train --kind gates`) started.
The first process collects all results, so the machines need no common disk. These launchers set the environment
variables RANK and WORLD_SIZE of each process."""

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
    """The `size` processes of one launch; this process is number `rank`. Without a launcher, size is 1. Every process
    must call `join` first, and all must call the other methods in the same order."""

    def __init__(self) -> None:
        self.rank, self.size = (int(os.environ.get(name, alone)) for name, alone in (("RANK", 0), ("WORLD_SIZE", 1)))
        self.group = None  # None: torch's default group

    def join(self) -> "Processes":
        """Make torch's process group if there are several processes and no group yet, and return self. The group is
        never destroyed, because a second group of this launch would find the first one's addresses in the launcher's
        store."""
        day = timedelta(days=1)  # the timeout: other processes wait until the slowest has done its share
        if self.size > 1 and not distributed.is_initialized():
            distributed.init_process_group("gloo", timeout=day)
        elif self.size > 1:  # torch's default group exists already, but may support GPU tensors only
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
        """Return the sum of all processes' tensors x, which have one shape, on the device of x. The bits of the sum are
        equal in all processes."""
        if self.size == 1:
            return x
        total = x.cpu().clone()
        distributed.all_reduce(total, group=self.group)
        return total.to(x.device)

    def lines(self, cases: Sequence[T], measure: Callable[[T], Iterator[Line]]) -> Iterator[Line]:
        """Yield the lines that the generator measure(case) yields for every case. A single process yields each line as
        soon as it is known. Of several processes, each measures one of `size` cases at a time, and then the first
        process yields the lines of all."""
        for start in range(0, len(cases), self.size):
            some = cases[start : start + self.size]
            if self.size == 1:
                yield from measure(some[0])
                continue
            mine = list(measure(some[self.rank])) if self.rank < len(some) else []
            found: Any = [None] * self.size if self.rank == 0 else None
            distributed.gather_object(mine, found, group=self.group)
            yield from itertools.chain(*found or [])
