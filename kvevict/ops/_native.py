"""Loads the compiled extension `_C` and makes a Python function of each of its ops. `_C.ops()` returns csrc/ops.def,
the list of every op's arguments and results. The functions, their error messages, the shapes in their docstrings and
their fake tensors (torch.compile) are all made from this list."""

import functools
import re
import textwrap
from collections.abc import Callable, Collection
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

try:
    import torch
except ImportError as missing:
    raise ImportError("kvevict needs PyTorch: pip install 'torch>=2.10'") from missing

if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < (2, 10):
    raise ImportError(f"kvevict needs torch 2.10 or newer, this is {torch.__version__}: pip install -U torch")

try:
    from kvevict import _C  # type: ignore[attr-defined]
except ImportError as failed:
    raise ImportError(
        f"kvevict's compiled part cannot be loaded ({failed}). Build it for this Python and torch: "
        "pip install --no-build-isolation . (in the source tree: pip install --no-build-isolation -e .)"
    ) from failed

FLOATS = (torch.float32, torch.float16, torch.bfloat16)  # dtypes that queries, keys, values and slots may have
Function = TypeVar("Function", bound=Callable)


class Operand(NamedTuple):
    """A row of csrc/ops.def: an argument or a result of an op."""

    kind: str  # "tensor", "rows", "slots", "number", "flag", "integer", "count", "choice" or "result"
    type: str  # its type in the op's schema, such as "Tensor?"
    name: str
    dtype: str  # a tensor's dtype; "": the dtype of the op's first argument
    words: list[str]  # the names of a tensor's sizes; the name of the size that a count equals; a choice's strings

    def is_tensor(self) -> bool:
        return self.kind in ("tensor", "rows", "slots")

    def dtype_beside(self, first: torch.Tensor) -> torch.dtype:
        """The dtype of this operand, a tensor, in a call of the op whose first argument is the tensor `first`."""
        return getattr(torch, self.dtype) if self.dtype else first.dtype


OPS: dict[str, list[Operand]] = {}
for _line in _C.ops().splitlines():
    _op, *_row, _words = _line.split("\t")
    OPS.setdefault(_op, []).append(Operand(*_row, words=_words.split(", ")))
# The fields of `_ops.Held` (k, v, ..) that ops take as separate arguments held_k, held_v, ..
PARTS = {row.name.removeprefix("held_") for rows in OPS.values() for row in rows if row.name.startswith("held_")}


def arguments(op: str) -> list[Operand]:
    """The op's rows of csrc/ops.def that are arguments, not results."""
    return [row for row in OPS[op] if row.kind != "result"]


def places(op: str, parameters: Collection[str]) -> list[str]:
    """For each argument of the op, the expression that gives its value in a function with these parameters: `q` for the
    argument q; `held.k` for the argument held_k, if `held` is one of the parameters."""
    split = [(arg.name, *arg.name.partition("_")[::2]) for arg in arguments(op)]
    return [f"{held}.{part}" if held in parameters and part in PARTS else name for name, held, part in split]


def function(op: str, parameters: str = "") -> Callable:
    """Make a Python function that calls the op. parameters: the parameter list of the function, as text; "": the op's
    arguments. The function is compiled from source text, so that its calls cost no more than torch's own."""
    parameters = parameters or ", ".join(arg.name for arg in arguments(op))
    names: dict = dict(call=getattr(torch.ops.kvevict, op).default, explained=explained, note_written=note_written)
    values, written = [], []
    for arg, place in zip(arguments(op), places(op, re.findall(r"\w+", parameters))):
        # If the `Held` is None, None is passed for a tensor and 0 for a kind
        if "." in place and arg.type in ("Tensor?", "int"):
            place = f"{place.split('.')[0]} and {place}{' or 0' * (arg.type == 'int')}"
        values.append(f"{arg.name}_of[{place}]" if arg.kind == "choice" else place)
        names[f"{arg.name}_of"] = {word: i for i, word in enumerate(arg.words)}
        written += [place] * arg.type.endswith("!)")
    source = f"""
def {op}({parameters}):
    try:
        result = call({", ".join(values)})
    except (RuntimeError, KeyError, AttributeError) as error:
        raise explained({op!r}, error, locals()) from None
    {f"note_written({', '.join(written)})" if written else ""}
    return result
"""
    exec(compile(source, f"<kvevict.{op}>", "exec"), names)
    return names[op]


def op(stub: Function) -> Function:
    """Decorator: replace `stub`, an empty function named like an op, by one that calls the op. It keeps the stub's
    signature and its docstring, to which the shapes of the op's tensors are added."""
    code = stub.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    options = names[code.co_argcount :]
    made = function(stub.__name__, ", ".join([*names[: code.co_argcount], *(["*"] if options else []), *options]))
    functools.update_wrapper(made, stub)
    made.__defaults__, made.__kwdefaults__ = stub.__defaults__, stub.__kwdefaults__
    made.__doc__ = f"{stub.__doc__}\n{shapes(stub.__name__, names)}\n"
    return made  # type: ignore[return-value]


def shapes(op: str, parameters: Collection[str]) -> str:
    """The lines of a docstring that list the op's tensors with their shapes and dtypes: arguments, then results. A
    tensor has the name by which a function with these parameters reads it (`places`)."""
    lines, named = [], [arg._replace(name=place) for arg, place in zip(arguments(op), places(op, parameters))]
    for head, rows in ("", [arg for arg in named if arg.is_tensor()]), ("-> ", OPS[op][len(named) :]):
        alike = groupby(rows, lambda row: (row.dtype, row.words, row.type == "Tensor?"))
        groups = [
            f"{' '.join(row.name for row in group)}{dtype and ' ' + dtype} [{','.join(sizes)}]{' or None' * optional}"
            for (dtype, sizes, optional), group in alike
        ]
        lines += textwrap.wrap(head + ",  ".join(groups), 112) if groups else []
    return textwrap.indent("\n".join(lines), "    ")


def explained(op: str, error: Exception, given: dict) -> Exception:
    """The exception to raise for a failed call of an op: it names the wrong argument, if there is one. Arguments are
    checked only here, after a failure, since checks take time.

    error   the exception that the call raised
    given   the arguments of the Python function, by name
    """
    named = [arg._replace(name=place) for arg, place in zip(arguments(op), places(op, given))]
    values, packed = [], set()
    for arg in named:
        name, _, part = arg.name.partition(".")
        value, is_absent = given[name], given[name] is None and arg.type in ("Tensor?", "int")
        if part and not is_absent:
            if not hasattr(value, part):
                return TypeError(f"kvevict.{op}: {name} is {value!r}, expected a kvevict.ops._ops.Held")
            value = getattr(value, part)
            is_absent = value is None and arg.type == "Tensor?"
        values.append(value)
        if part.endswith("_kind") and value:
            packed.add(arg.name.removesuffix("_kind"))
        if arg.kind == "choice" and value not in arg.words:
            return ValueError(f"kvevict.{op}: {name} is {value!r}, expected one of {', '.join(arg.words)}")
        if arg.is_tensor() and not isinstance(value, torch.Tensor) and not is_absent:
            return TypeError(f"kvevict.{op}: {arg.name} is {value!r}, expected a tensor")
    tensors = [(arg, value) for arg, value in zip(named, values) if isinstance(value, torch.Tensor)]
    lead = tensors[0][1] if tensors else torch.empty(0)
    for arg, t in tensors:
        want = torch.uint8 if arg.name in packed else arg.dtype_beside(lead)
        if t.device != lead.device:
            return ValueError(f"kvevict.{op}: {arg.name} is on {t.device}, the others on {lead.device}")
        if t.dtype != want:
            return TypeError(f"kvevict.{op}: {arg.name} is {t.dtype}, expected {want}")
        if not arg.dtype and arg.name not in packed and t.dtype not in FLOATS:
            return TypeError(f"kvevict.{op}: {arg.name} is {t.dtype}, expected float32, float16 or bfloat16")
    if isinstance(error, NotImplementedError) and lead.device.type != "cpu":
        kernels = f"this build has no {lead.device.type.upper()} kernels"
        return ValueError(f"kvevict.{op}: {kernels}; move the model and its inputs to the CPU")
    text = re.sub(r"^\w+, \S+:\d+, ", "", str(error))  # without the location in csrc at its begin
    for arg, shown in zip(arguments(op), named):
        text = re.sub(rf"\b{arg.name}\b", shown.name, text)
    # An error with this text is about an option, since the checks above have found no wrong tensor
    is_option = re.match(r"[\w.]+ is .*, expected", text)
    return (ValueError if is_option else RuntimeError)(f"kvevict.{op}: {text}")


def note_written(*tensors: torch.Tensor) -> None:
    """Tell autograd that an op has overwritten these tensors, so that autograd refuses a backward pass that needs their
    earlier values."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version(tensors)


def fake(op: str) -> Callable:
    """Make a function that returns an op's results as empty tensors of the right shapes, for torch.compile and fake
    tensors. Torch also calls this function for real tensors if one of them is on the device "meta"."""

    def results(*values: Any) -> Any:
        given = list(zip(arguments(op), values))
        tensors = [(arg, t) for arg, t in given if isinstance(t, torch.Tensor)]
        devices = {t.device for _, t in tensors}
        torch._check(len(devices) < 2, lambda: f"tensors are on different devices: {sorted(map(str, devices))}")
        sizes: dict = {size: n for arg, t in reversed(tensors) for size, n in zip(arg.words, t.shape)} | {"1": 1}
        sizes |= {arg.words[0]: value for arg, value in given if arg.kind == "count"}
        each = any(arg.name == "group" and arg.words[value] == "none" for arg, value in given)
        sizes["heads"] = sizes.get("H" if each else "Hkv")
        made = [
            values[0].new_empty([sizes[size] for size in row.words], dtype=row.dtype_beside(values[0]))
            for row in OPS[op][len(values) :]
        ]
        return tuple(made) if len(made) > 1 else made[0] if made else None

    return results


for _op in OPS:
    torch.library.register_fake(f"kvevict::{_op}", fake(_op))


def cpu_isa() -> str:
    """The instruction set of the CPU kernels: "amxbf16" or "avx512bf16" (both multiply bf16 without conversion),
    "avx512", "avx2" or "scalar"; on ARM "neonbf16" or "neon". The environment variable KVEVICT_CPU_ISA names the
    highest set that may be chosen, or "avx512bf16" on a CPU where this set is not the fastest; a name that is not an
    instruction set of this build is an error here and in every op."""
    return _C.cpu_isa()


def build_info() -> dict:
    """Facts about the extension's build, such as {"cuda": True, "cuda_archs": "80,90", "torch_target": "2.10"}."""
    return _C.build_info()


DEVICES = ("cpu", "cuda") if build_info()["cuda"] else ("cpu",)  # device types for which this build has kernels
