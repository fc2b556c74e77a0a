"""Processes that share the cases of an evaluation: `accelerate launch -m kvevict eval`, torchrun. The first one has the
results file; the others' lines come to it, so machines need no common disk. A launcher says so in the environment."""

import itertools
import os
from datetime import timedelta


class Processes:
    """All processes of this evaluation, of which this is number `rank` of `size`; one that no launcher started is
    alone. To be used in a `with` statement by all of them, and by all in the same order."""

    def __init__(self):
        self.rank, self.size = (int(os.environ.get(name, alone)) for name, alone in (("RANK", 0), ("WORLD_SIZE", 1)))
        self.began = False  # whether the group is ours to end

    def __enter__(self):
        from torch import distributed

        if self.size > 1 and not distributed.is_initialized():
            distributed.init_process_group(
                "gloo", timeout=timedelta(days=1)
            )  # the slowest case of a round is waited for
            self.began = True
        return self

    def __exit__(self, *error):
        from torch import distributed

        if self.began:
            distributed.destroy_process_group()

    def broadcast(self, value):
        """The first process's value, in all of them."""
        from torch import distributed

        if self.size == 1:
            return value
        box = [value]
        distributed.broadcast_object_list(box)
        return box[0]

    def lines(self, cases, measure):
        """Yield every line that measure(case), a generator, has of every case, as soon as it is known; where there are
        several processes, each measures every so many of the cases, and the first yields all lines."""
        from torch import distributed

        for start in range(0, len(cases), self.size):
            some = cases[start : start + self.size]
            if self.size == 1:
                yield from measure(some[0])
                continue
            mine = list(measure(some[self.rank])) if self.rank < len(some) else []
            found = [None] * self.size if self.rank == 0 else None
            distributed.gather_object(mine, found)
            yield from itertools.chain(*found or [])
