"""The operators that a decoded token calls: noted, compared with another token's, and called again without a model."""

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

# Methods that give Python a number, and operators whose result it reads.
READS = {
    Tensor.tolist, Tensor.numpy, Tensor.item, Tensor.is_nonzero, Tensor.__array__, Tensor.__bool__, Tensor.__int__,
    Tensor.__float__, Tensor.__index__, Tensor.__contains__,
}  # fmt: skip
INDEX = torch.ops.aten.index.Tensor
READING_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Call(NamedTuple):
    """One call of an operator, with the very tensors that it got and returned."""

    operator: OpOverload
    args: tuple
    options: dict
    output: object

    def given(self) -> Iterator[Tensor]:
        return _tensors((*self.args, *self.options.values()))

    def new(self) -> list[bool]:
        """For each tensor that it returned: whether it is neither a view of one that was given nor one of these."""
        given = {_storage(x) for x in self.given()}
        return [_storage(x) not in given for x in _tensors((self.output,))]


class Calls(TorchDispatchMode):
    """Inside, notes every call of an operator, and whether Python reads a number from a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[Call] = []  # holds all tensors, so that no address is used twice
        self.reads: str | None = None  # what read a number

    def __enter__(self) -> Calls:
        self.functions = _Reads(self)
        self.functions.__enter__()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.functions.__exit__(*error)
        del self.functions  # it refers to this object: no cycle keeps the tensors

    def __torch_dispatch__(
        self, operator: OpOverload, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        output = operator(*args, **(kwargs or {}))
        self.noted.append(Call(operator, args, kwargs or {}, output))
        if READING_TAGS & {*operator.tags} and not (operator is INDEX and _by_numbers(args[1])):
            self.reads = str(operator)
        return output

    def difference(self, other: Calls) -> str | None:
        """The name of the first operator that another token calls with other numbers, or on tensors in other places;
        None: there is none. A tensor that was made inside counts as the result of its call."""
        mine, its = (list(each._described()) for each in (self, other))
        return next((str((a or b)[0]) for a, b in zip_longest(mine, its) if a != b), None)

    def _described(self) -> Iterator[tuple]:
        made: dict[int, int] = {}  # a storage -> the call that made it

        def described(value: object) -> object:
            if isinstance(value, (list, tuple)):
                return [described(each) for each in value]
            if not isinstance(value, Tensor):
                return value
            place = made.get(_storage(value)), _storage(value) not in made and value.untyped_storage().data_ptr()
            return place, value.storage_offset(), value.shape, value.stride(), value.dtype

        for at, call in enumerate(self.noted):
            yield call.operator, [described(each) for each in (*call.args, *call.options.values())]
            for x, is_new in zip(_tensors((call.output,)), call.new(), strict=True):
                if is_new:
                    made[_storage(x)] = at

    def again(self) -> Callable[[], None]:
        """A function that makes the calls again: it reads and writes the same tensors, in the memory where they are, so
        views need no call."""
        steps = [_again(call) for call in self.noted if _writes(call.operator) or any(call.new())]

        def again() -> None:
            with torch.inference_mode():
                for function, args, options in steps:
                    function(*args, **options)

        return again


class _Reads(TorchFunctionMode):
    """Inside, notes that Python reads a number from a tensor: what it then does is not an operator."""

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


def _by_numbers(indices: Iterable[Tensor | None]) -> bool:
    """Whether the shape of what they select does not depend on their values."""
    return not any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in indices)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _again(call: Call) -> tuple[Callable, tuple, dict]:
    """A function with its arguments that makes a call again and writes the results where they were."""
    operator, args, options, output = call
    into = _into(operator) if isinstance(output, Tensor) and not _writes(operator) else None
    if into is not None:
        return into, args, {**options, "out": output}
    if operator._schema.name in ("aten::_to_copy", "aten::clone"):
        return torch.ops.aten.copy_.default, (output, args[0]), {}
    places = [(at, x) for at, (x, is_new) in enumerate(zip(_tensors((output,)), call.new(), strict=True)) if is_new]
    if not places:
        return operator, args, options

    def copied(*args: object, **options: object) -> None:
        results = list(_tensors((operator(*args, **options),)))
        for at, place in places:
            place.copy_(results[at])

    return copied, args, options


@functools.cache
def _writes(operator: OpOverload) -> bool:
    """Whether it writes to a tensor that it is given."""
    return any(each.alias_info is not None and each.alias_info.is_write for each in operator._schema.arguments)


@functools.cache
def _into(operator: OpOverload) -> OpOverload | None:
    """The operator that writes the same result to a tensor `out`, if it is as fast."""
    packet = operator._overloadpacket
    own = [(each.name, str(each.type)) for each in operator._schema.arguments]
    for name in packet.overloads():
        other = getattr(packet, name)
        given = [(each.name, str(each.type)) for each in other._schema.arguments if not each.is_out]
        results = [each.name for each in other._schema.arguments if each.is_out]
        if results == ["out"] and given == own and torch.Tag.generated not in other.tags:
            return other
    return None
