"""How the step of a decoded token is recorded on each kind of device."""

import functools
from collections.abc import Callable

import torch
from transformers.utils import ModelOutput

from .calls import Calls


def _graph(run: Callable[[], ModelOutput], device: torch.device) -> tuple[ModelOutput, Callable[[], None]]:
    """Run a step on a GPU and record it as a CUDA graph. Returns the result, and a function that computes the step
    again in the same memory, from inputs in the same memory."""
    graph, side, here = torch.cuda.CUDAGraph(), _side_stream(device), torch.cuda.current_stream(device)
    side.wait_stream(here)
    with torch.cuda.stream(side):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            output = run()
        finally:
            graph.capture_end()
    here.wait_stream(side)
    graph.replay()
    return output, graph.replay


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # the default stream cannot record, and cuBLAS takes memory for each stream


def _program(run: Callable[[], ModelOutput], device: torch.device) -> tuple[ModelOutput, Callable[[], None]]:
    """Run a step on a CPU and record its operator calls. Returns as `_graph`."""
    with Calls() as calls:
        output = run()
    return output, calls.again()


RECORDERS = {"cuda": _graph, "cpu": _program}
PATIENCE = {"cuda": 1, "cpu": 8}  # tokens without a move of slots before one is recorded, since recording takes time
