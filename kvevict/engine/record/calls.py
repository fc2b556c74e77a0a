"""How the step of a decoded token is recorded: on a GPU as a CUDA graph; on a CPU as its operator calls, which are
noted, compared with another token's, and repeated without the model."""

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

# Methods that give Python a number, and the tags of operators whose result Python reads
READS = {
    Tensor.tolist, Tensor.numpy, Tensor.item, Tensor.is_nonzero, Tensor.__array__, Tensor.__bool__, Tensor.__int__,
    Tensor.__float__, Tensor.__index__, Tensor.__contains__,
}  # fmt: skip
INDEX = torch.ops.aten.index.Tensor
READING_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class OpCall(NamedTuple):
    """One call of an operator, with the tensors themselves that it got and returned."""

    operator: OpOverload
    args: tuple
    options: dict
    output: object

    def results(self) -> list[tuple[Tensor, bool]]:
        """The tensors that were returned, each with whether it is new: neither an argument nor a view of one."""
        given = {_storage(x) for x in _tensors((*self.args, *self.options.values()))}
        return [(x, _storage(x) not in given) for x in _tensors((self.output,))]


class Calls(TorchDispatchMode):
    """A context that notes every call of an operator, and whether Python reads a number from a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[OpCall] = []  # it keeps all tensors alive, so that no address is used twice
        self.reads: str | None = None  # the function or operator that read a number

    def __enter__(self) -> Calls:
        self.functions = _Reads(self)
        self.functions.__enter__()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.functions.__exit__(*error)
        del self.functions  # a cycle of references would keep the tensors

    def __torch_dispatch__(
        self, operator: OpOverload, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        output = operator(*args, **(kwargs or {}))
        self.noted.append(OpCall(operator, args, kwargs or {}, output))
        if READING_TAGS & {*operator.tags} and not (operator is INDEX and _has_fixed_shape(args[1])):
            self.reads = str(operator)
        return output

    def difference(self, other: Calls) -> str | None:
        """The name of the first operator that another token calls with other numbers, or on tensors at other addresses;
        None: no such operator. A tensor that a noted call made is compared by the number of that call."""
        mine, its = (list(each._described()) for each in (self, other))
        return next((str((a or b)[0]) for a, b in zip_longest(mine, its) if a != b), None)

    def _described(self) -> Iterator[tuple]:
        made: dict[int, int] = {}  # storage -> number of the call that made it

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
        """A function that repeats the calls on the same memory. Views of it are still valid and need no call."""
        steps = [_again(call) for call in self.noted if _writes(call.operator) or any(new for _, new in call.results())]

        def again() -> None:
            with torch.inference_mode():
                for function, args, options in steps:
                    function(*args, **options)

        return again


class _Reads(TorchFunctionMode):
    """A context that notes when Python reads a number from a tensor: what Python does with it is no operator call."""

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
    """Whether the shape of x[indices] does not depend on the values of the indices: none is a mask."""
    return not any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in indices)


def _storage(tensor: Tensor) -> int:
    """A number for the memory of a tensor, the same for its views."""
    return tensor.untyped_storage()._cdata


def _again(call: OpCall) -> tuple[Callable, tuple, dict]:
    """A function and its arguments that repeat a call and write the results to the memory of the first ones."""
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
    """The overload that writes the result to an argument `out`; None: there is none, or it is a generated, slow one."""
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
