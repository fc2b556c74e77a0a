"""Steps of decoded tokens as CUDA graphs, by recordings of operator calls, as a CPU has no graphs. vLLM's part is
emulated: a step is recorded over rows that only pad it, and repeated for any requests in any blocks."""

import random

import pytest
import torch
from policy_cases import BUDGET, CHUNK
from states_host import cache

from kvevict.engine.record.calls import Calls
from kvevict.vllm.layers import Layers
from kvevict.vllm.options import VllmOptions, policy_of
from kvevict.vllm.questions import NONE
from kvevict.vllm.shape import StateShape
from kvevict.vllm.state import States

LAYERS, ROWS, BLOCKS, HEADS, KV_HEADS, DIM, LONGEST = 3, 4, 7, 4, 2, 16, 60
POISON = range(255, 256)  # such bytes are NaN and -1
CASES = {
    "snapkv": (dict(window=4), "model"),
    "snapkv, as long as the period": (dict(window=CHUNK), "int4"),
    "edie": (dict(window=4), "model"),
    "edie, packed": (dict(window=4), "int8"),
    "take+edie": (dict(probe=5, warmup_layers=None), "model"),
    "chunkkv": (dict(window=4, c=4), "model"),
    "h2o": ({}, "model"),
    "h2o, packed": ({}, "int8"),
    "streaming": ({}, "model"),
}


class Requests:
    """Five requests in blocks of their own, two of which begin with a decoded token, in states of LAYERS layers."""

    def __init__(self, shape, rows):
        attention = dict(scale=DIM**-0.5, softcap=0.0, sinks=None)
        self.caches = [cache(shape, BLOCKS, POISON) for _ in range(LAYERS)]
        states = [States(each, shape, i, attention) for i, each in enumerate(self.caches)]
        self.layers, self.rows, self.at = Layers(states, ROWS), rows, [0, 5, 3 * CHUNK, 2 * CHUNK + 7, 0]
        self.layers.kept.fill_(POISON.start)
        for request, count in enumerate(self.at):
            for states, (q, k, v) in zip(self.layers.states, rows[request], strict=True):
                count and states.read(q[:count], k[:count], v[:count], self.block(request), 0)

    def block(self, request):
        return BLOCKS - 1 - request  # so block 1 has none

    def decode(self, step, rows):
        """Outputs [L, n, H, D] of a step's rows: q, k and v of each layer."""
        both = zip(self.layers.states, rows, strict=True)
        return torch.stack([states.decode(q, k, v, step) for states, (q, k, v) in both])

    def begin(self, requests):
        """The rows of the requests' next tokens, and their blocks and lengths with these."""
        rows = [[torch.stack(x) for x in zip(*each)] for each in zip(*(self.next(request) for request in requests))]
        for request in requests:
            if self.at[request] % CHUNK == 0:
                self.layers.begin(self.block(request), self.at[request], NONE)
            self.at[request] += 1
        return rows, [self.block(request) for request in requests], [self.at[request] for request in requests]

    def next(self, request):
        return [[x[self.at[request]] for x in layer] for layer in self.rows[request]]

    def singles(self, blocks, lengths, pad=0):
        blocks, lengths = (torch.tensor(x + [0] * pad, dtype=torch.int32) for x in (blocks, lengths))
        return self.layers.singles(blocks, lengths, [])


@pytest.mark.parametrize("name", CASES)
def test_a_recorded_step_decodes_any_requests(name):
    """Bit for bit as steps of these requests alone, over periods' ends; no row that pads a step, nor any request,
    changes another's block; and the host reads no number between two evictions."""
    chosen, kind = CASES[name]
    options = VllmOptions(policy_of(dict(policy=name.split(",")[0], budget=BUDGET) | chosen, CHUNK), CHUNK, 2, kind)
    shape, width = StateShape(KV_HEADS, DIM, torch.float32, options), (HEADS, KV_HEADS, KV_HEADS)
    rows = [[[torch.randn(LONGEST, n, DIM) for n in width] for _ in range(LAYERS)] for _ in range(5)]
    alone, graph = Requests(shape, rows), Requests(shape, rows)
    memory = [[torch.randn(ROWS, n, DIM) for n in width] for _ in range(LAYERS)]
    padding = graph.singles([], [], ROWS)
    with Calls() as calls:
        out = graph.decode(padding, memory)
    again = calls.again()
    for _ in range(50):
        requests = random.sample([i for i in range(5) if alone.at[i] < LONGEST], random.randint(1, ROWS))
        new, *known = alone.begin(requests)
        with Calls() as own:
            want = alone.decode(alone.singles(*known), new)
        assert own.reads is None
        for mine, given in zip(memory, graph.begin(requests)[0], strict=True):
            for x, y in zip(mine, given, strict=True):
                x[: len(requests)] = y
        graph.singles(*known, ROWS - len(requests))
        again()
        assert torch.equal(out[:, : len(requests)], want) and out.isfinite().all()
    for mine, own in zip(graph.caches, alone.caches, strict=True):
        mine, own = (x.transpose(0, 1).contiguous().view(torch.uint8) for x in (mine, own))
        assert torch.equal(mine[:, 1:], own[:, 1:]) and (mine[:, 1] == POISON.start).all()
    assert torch.equal(graph.layers.kept[:, 1:], alone.layers.kept[:, 1:])
