"""How a device records what a step computes."""

import functools
from collections.abc import Callable

import torch
from transformers.utils import ModelOutput

from .calls import Calls


def _graph(run: Callable[[], ModelOutput], device: torch.device) -> tuple[ModelOutput, Callable[[], None]]:
    """Compute what `run` computes on a GPU, and record it. Returns the result, and a function that computes it again,
    in the same memory, from inputs in the same memory."""
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
    return torch.cuda.Stream(device)  # the default one cannot record; each has a workspace of cuBLAS


def _program(run: Callable[[], ModelOutput], device: torch.device) -> tuple[ModelOutput, Callable[[], None]]:
    """The same on a CPU, where its operators are called again."""
    with Calls() as calls:
        output = run()
    return output, calls.again()


RECORDERS = {"cuda": _graph, "cpu": _program}
PATIENCE = {"cuda": 1, "cpu": 8}  # tokens on slots that did not move before one is recorded: a recording takes time
