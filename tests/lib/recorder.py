"""A stand-in for CUDA graphs on a CPU: notes the operators of a step with their tensors, and calls them again."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


def tensors(values):
    return [x for x in tree_flatten(values)[0] if isinstance(x, torch.Tensor)]


class Recorder(TorchDispatchMode):
    """As a graph: the tensors of the recorded run are read and written again, at their addresses, by a replay."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        output = operator(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tensors((args, kwargs))}
        new = [x.untyped_storage()._cdata not in given for x in tensors(output)]  # else a view, or written in place
        self.calls.append((operator, args, kwargs or {}, output, new))
        return output

    def replay(self):
        with torch.inference_mode():
            for operator, args, kwargs, output, new in self.calls:
                again = operator(*args, **kwargs)
                for known, x, is_new in zip(tensors(output), tensors(again), new, strict=True):
                    if is_new:
                        known.copy_(x)


def record(run, device):
    with Recorder() as recorder:
        output = run()
    for *_, made, new in recorder.calls:  # a replay must not read what the recording has left behind
        for x, is_new in zip(tensors(made), new, strict=True):
            if is_new and x.is_floating_point():
                x.fill_(float("nan"))
    return output, recorder.replay
