"""The layers whose requests have the same blocks, and what their states share in a step of decoded tokens.

vLLM may replay such a step as a CUDA graph. So its operators read what changes from step to step in memory that stays
where it is. That memory is filled before the step, by operators that read no number from the device, and slots are
evicted before the step, not in it.
"""

from functools import partial

import torch
from torch import Tensor

from .questions import Copies
from .state import Singles, States


class Layers:
    """The states of requests in L layers of one shape."""

    def __init__(self, states: list[States], most: int) -> None:
        """most: the largest number of requests in a step."""
        self.states, self.shape, heads = states, states[0].shape, states[0].shape.kv_heads
        zeros = partial(torch.zeros, dtype=torch.int32, device=states[0].device)
        self.kept, no_positions = zeros(len(states), len(states[0].positions), heads), zeros(len(states[0].k))
        for i, each in enumerate(states):
            each.index, each.kept, each.no_positions = i, self.kept[i], no_positions
        # Rows of block 0 for rows that only pad: the decode op writes no row twice.
        self.unused = torch.arange(most * heads, device=self.kept.device).view(most, heads) % self.shape.rows
        length, one = zeros(len(states), most, heads), zeros(most)
        self.memory = Singles(one.long(), one.bool(), one[:, None], one.long(), length.long(), length, [])

    def begin(self, block: int, tokens: int, copies: Copies) -> None:
        """Make the state of the request in `block` ready for its next period in every layer (`States.begin`)."""
        for each in self.states:
            each.begin(block, tokens, copies)

    def singles(self, blocks: Tensor, lengths: Tensor, numbers: list[int]) -> Singles:
        """Describe requests [n] by their blocks and by how many tokens they have with the step's one, 0 for a row that
        only pads."""
        n, shape, period = len(blocks), self.shape, self.shape.options.period
        is_used = (blocks > 0) & (lengths > 0)
        blocks, before = torch.where(is_used, blocks, 0).long(), torch.where(is_used, lengths - 1, 0)
        since = before % period
        # Before a request's first eviction `kept` has the counts of an earlier request in the same block.
        kept = torch.where((before < period)[:, None], 0, self.kept[:, blocks])
        start = (kept + period).cumsum(2) - kept - period
        offset = torch.where(is_used[:, None], start + (blocks * shape.pitch)[:, None], self.unused[:n])
        place = (since - (period - shape.options.window)).clamp_min(0)
        values, its = (blocks, before == 0, since[:, None], place, offset, kept + since[:, None]), self.memory
        step = Singles(
            its.blocks[:n], its.is_new[:n], its.since[:n], its.place[:n], its.offset[:, :n], its.length[:, :n], numbers
        )
        for memory, value in zip(step[:-1], values, strict=True):
            memory.copy_(value)
        return step
