"""Recordings of a decoded token's step: on a GPU a CUDA graph; on a CPU a list of operator calls, which is compared
with another token's list and then repeated without running the model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.utils import ModelOutput

# Methods by which Python reads a number from a tensor
READS = {
    Tensor.tolist, Tensor.numpy, Tensor.item, Tensor.is_nonzero, Tensor.__array__, Tensor.__bool__, Tensor.__int__,
    Tensor.__float__, Tensor.__index__, Tensor.__contains__,
}  # fmt: skip
INDEX = torch.ops.aten.index.Tensor
# Tags of operators whose result, or its shape, depends on numbers that Python reads from a tensor
READING_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class OpCall(NamedTuple):
    """One call of an operator, with references to its argument tensors and result tensors."""

    operator: OpOverload
    args: tuple
    options: dict
    output: object

    def results(self) -> list[tuple[Tensor, bool]]:
        """Return (tensor, whether it is new) for each result; a new tensor is neither an argument nor a view of one."""
        given = {_storage(x) for x in _tensors((*self.args, *self.options.values()))}
        return [(x, _storage(x) not in given) for x in _tensors((self.output,))]


class Calls(TorchDispatchMode):
    """A context manager that notes every operator call, and whether Python reads a number from a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[OpCall] = []  # keeps the calls' tensors alive, so that no address is used twice
        self.reads: str | None = None  # the last function or operator that read a number; None: none did

    def __enter__(self) -> Calls:
        self.functions = _Reads(self)
        self.functions.__enter__()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.functions.__exit__(*error)
        del self.functions  # otherwise a cycle of references keeps the tensors alive

    def __torch_dispatch__(
        self, operator: OpOverload, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        output = operator(*args, **(kwargs or {}))
        self.noted.append(OpCall(operator, args, kwargs or {}, output))
        if READING_TAGS & {*operator.tags} and not (operator is INDEX and _has_fixed_shape(args[1])):
            self.reads = str(operator)
        return output

    def difference(self, other: Calls) -> str | None:
        """Return the name of the first operator that the two tokens call with different numbers, or on tensors at
        different addresses; None if all calls agree. A tensor that a noted call has created is identified by the number
        of that call instead of its address."""
        mine, its = (list(each._described()) for each in (self, other))
        return next((str((a or b)[0]) for a, b in zip_longest(mine, its) if a != b), None)

    def _described(self) -> Iterator[tuple]:
        made: dict[int, int] = {}  # storage of a tensor -> number of the call that created it

        def described(value: object) -> object:
            if isinstance(value, (list, tuple)):
                return [described(each) for each in value]
            if not isinstance(value, Tensor):
                return value
            place = made.get(_storage(value)), _storage(value) not in made and value.untyped_storage().data_ptr()
            return place, value.storage_offset(), value.shape, value.stride(), value.dtype

        for at, call in enumerate(self.noted):
            yield call.operator, [described(each) for each in (*call.args, *call.options.values())]
            made |= {_storage(x): at for x, is_new in call.results() if is_new}

    def again(self) -> Callable[[], None]:
        """Return a function that repeats the calls on the same memory. Calls that only create views are not repeated,
        since these views stay valid."""
        steps = [_again(call) for call in self.noted if _writes(call.operator) or any(new for _, new in call.results())]

        def again() -> None:
            with torch.inference_mode():
                for function, args, options in steps:
                    function(*args, **options)

        return again


class _Reads(TorchFunctionMode):
    """A context manager that notes when Python reads a number from a tensor. A step in which Python does so cannot be
    repeated, since what Python does with the number is not an operator call."""

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self.calls = calls

    def __torch_function__(
        self, function: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        if function in READS:
            self.calls.reads = function.__name__
        return function(*args, **(kwargs or {}))


def _tensors(values: Iterable[object]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _has_fixed_shape(indices: Iterable[Tensor | None]) -> bool:
    """Whether the shape of x[indices] does not depend on the values of the indices, because none of them is a mask."""
    return not any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in indices)


def _storage(tensor: Tensor) -> int:
    """Return a number that identifies the memory of a tensor; a tensor and its views have the same number."""
    return tensor.untyped_storage()._cdata


def _again(call: OpCall) -> tuple[Callable, tuple, dict]:
    """Return (function, arguments, options) that repeat a call and write the results over those of the first call."""
    operator, args, options, output = call
    into = _with_out(operator) if isinstance(output, Tensor) and not _writes(operator) else None
    if into is not None:
        return into, args, {**options, "out": output}
    if operator._schema.name in ("aten::_to_copy", "aten::clone"):
        return torch.ops.aten.copy_.default, (output, args[0]), {}
    results = call.results()
    if not any(is_new for _, is_new in results):
        return operator, args, options

    def copied(*args: object, **options: object) -> None:
        for (place, is_new), result in zip(results, _tensors((operator(*args, **options),)), strict=True):
            if is_new:
                place.copy_(result)

    return copied, args, options


@functools.cache
def _writes(operator: OpOverload) -> bool:
    """Whether an operator writes to one of its arguments."""
    return any(each.alias_info is not None and each.alias_info.is_write for each in operator._schema.arguments)


@functools.cache
def _with_out(operator: OpOverload) -> OpOverload | None:
    """Return the overload that writes its result to an argument `out`; None if there is none, or only one that PyTorch
    has generated, which is slow."""
    packet = operator._overloadpacket
    own = [(each.name, str(each.type)) for each in operator._schema.arguments]
    for name in packet.overloads():
        other = getattr(packet, name)
        given = [(each.name, str(each.type)) for each in other._schema.arguments if not each.is_out]
        results = [each.name for each in other._schema.arguments if each.is_out]
        if results == ["out"] and given == own and torch.Tag.generated not in other.tags:
            return other
    return None


def _graph(run: Callable[[], ModelOutput], device: torch.device) -> tuple[ModelOutput, Callable[[], None]]:
    """Run a step on a GPU and record it as a CUDA graph. Returns the result, and a function that computes the step
    again: it reads the inputs from the same memory, and overwrites the result."""
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
    # The default stream cannot record. A device gets one stream, since cuBLAS allocates memory for each stream.
    return torch.cuda.Stream(device)


def _program(run: Callable[[], ModelOutput], device: torch.device) -> tuple[ModelOutput, Callable[[], None]]:
    """Run a step on a CPU and record its operator calls. Returns the result, and a function that computes the step
    again, as `_graph` does."""
    with Calls() as calls:
        output = run()
    return output, calls.again()


RECORDERS = {"cuda": _graph, "cpu": _program}
# Number of tokens decoded without a move of slots before a token is recorded, since recording takes time
PATIENCE = {"cuda": 1, "cpu": 8}
