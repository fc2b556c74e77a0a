"""csrc/ops.def is the one place where an op's arguments are written beside the struct, the kernel and the signature."""

import inspect
import re
from pathlib import Path

import pytest
import torch
from helpers import named, on_cpu
from problems import copied, i32, problem

from kvevict.ops import _native
from kvevict.ops import _ops as ops

ROOT = Path(__file__).parents[2]
PUBLIC = [name for name in _native.OPS if name != "kl_grad"]
ARGUMENTS = [(op, arg.name) for op in _native.OPS for arg in _native.arguments(op) if arg.is_tensor()]


def given(op):
    """Arguments of an op that it takes."""
    if op == "linear":
        return dict(x=torch.rand(2, 1, 32), weight=torch.rand(5, 32), bias=torch.rand(5))
    one = op in ("decode", "compact")
    p = problem(1, lens=3, first=0, layout="dense", **(dict(T=1) if op == "decode" else {}))
    (B, H, R, _), columns, pair = p["q"].shape, 16, i32([[3, 3]] * 2)
    p |= dict(stop=i32([p["k"].shape[2]] * 2), columns=columns, lse=torch.zeros(B, H, R), weight=torch.ones(B, H, R))
    p |= dict(observers=R, span=-1, past=torch.rand(B, H, R, 64), decay=torch.rand(B))
    p |= dict(cos=torch.rand(B, 64), sin=torch.rand(B, 64), partner=torch.arange(64).int())
    p |= dict(sinks=torch.zeros(H), causal=True, term="a", reduce="sum", group="none", kind="l1", alpha=0.5, p=2)
    p |= dict(x=p["k"], o=p["q"].transpose(1, 2), lo=pair * 0, hi=pair, fast=False, squared=True)
    p |= dict(target=torch.rand(B, H, 3), mean_attn=torch.rand(B, H, columns), grad=torch.ones(B, H))
    p |= dict(score=torch.rand(B, 2, columns), n=pair + 9, keep=pair)
    p |= dict(matrix=torch.rand(B, H, 64, 64), linear=torch.rand(B, H, 64))
    p |= dict(protect_first=i32([0, 1]), protect_last=i32([1, 0]))
    p |= {f"{name}_{part}": p[f"held_{part}"] for name in ("src", "prefix") for part in _native.PARTS}
    p |= dict(dst_k_kind=0, dst_v_kind=0, dst_k=torch.zeros(64, 64), dst_v=torch.zeros(64, 64), dst_pos=i32([0] * 64))
    p |= {f"{name}_centre": torch.zeros(B, 2, 64) for name in ("held", "src", "dst")}
    p |= dict(dst_offset=torch.arange(0, 16, 4).view(2, 2), index=torch.arange(3).int().expand(2, 2, 3).contiguous())
    return {arg.name: p[arg.name].clone() if one and arg.is_tensor() else p[arg.name] for arg in _native.arguments(op)}


def test_the_example_in_the_readme_is_the_code():
    """The rows and the signature of `norm` in csrc/README.md, "To add an op"."""
    blocks = re.findall(r"   ```(?:c|python)\n(.*?)   ```", (ROOT / "csrc/README.md").read_text(), re.S)
    rows, signature = (re.sub("^   ", "", block, flags=re.M) for block in blocks)
    assert rows in (ROOT / "csrc/ops.def").read_text()
    assert signature in (ROOT / "kvevict/ops/_ops.py").read_text()


def function(op):
    return getattr(ops, "_kl_grad" if op == "kl_grad" else op)


def shown(op, name):
    """How errors and documentation name an argument: `held_k` as a part of `held`, where that is a parameter."""
    return re.sub(r"^(held|src|dst|prefix)_", r"\1.", name) if op in PUBLIC else name


@pytest.mark.parametrize("op", PUBLIC)
def test_signature_schema_and_documentation(op):
    parameters = inspect.signature(function(op)).parameters
    arguments = _native.arguments(op)
    schema = getattr(torch.ops.kvevict, op).default._schema
    named = [shown(op, arg.name) for arg in arguments]
    assert set(parameters) == {name.split(".")[0] for name in named}
    assert set(parameters) <= {*function(op).__annotations__}
    assert [arg.name for arg in schema.arguments] == [arg.name for arg in arguments]
    for arg, name in zip(arguments, named):
        kind = ops.Held if "." in name else torch.Tensor
        optional = parameters[name.split(".")[0]].annotation == kind | None
        if not name.endswith((".centre", "_kind")):  # parts that may be None, and that no Held has as 0
            assert optional == (arg.type == "Tensor?") or op == "kl"  # which makes what is not given
        if arg.is_tensor():
            assert re.search(rf"\b{re.escape(name)}\b[^[]*\[", function(op).__doc__) or op == "kl"
    assert len(schema.returns) == len(_native.OPS[op]) - len(arguments)
    on_cpu(function(op), given(op))


@pytest.mark.parametrize("op, name", ARGUMENTS)
def test_a_bad_argument_is_named(op, name):
    p, arg = given(op), next(arg for arg in _native.arguments(op) if arg.name == name)
    said = f"^kvevict.{op}: {re.escape(shown(op, name))} "

    def call(**args):
        return on_cpu(function(op), args)

    with pytest.raises(TypeError, match=f"{said}is torch.bool, expected"):
        call(**{**p, name: p[name].bool()})
    with pytest.raises(RuntimeError, match=f"{said}has shape"):
        call(**{**p, name: p[name][None]})
    with pytest.raises(ValueError, match=r"is on (meta|cpu), the others on"):
        call(**{**p, name: p[name].to("meta")})
    if name in ("cos", "sin", "partner"):
        with pytest.raises(RuntimeError, match=r"some are None; give all three, or none"):
            call(**{**p, name: None})
    elif "prefix" in name:
        with pytest.raises(RuntimeError, match=r"some are None; give all four, or none"):
            call(**{**p, name: None})
    elif arg.type == "Tensor?":
        call(**{**p, name: None})
        with pytest.raises(RuntimeError, match=f"{said}has shape"):  # an empty tensor is not None
            call(**{**p, name: p[name].new_empty(0)})
    elif op != "kl":
        with pytest.raises(TypeError, match=f"{said}is None, expected a tensor"):
            call(**{**p, name: None})
    if arg.kind == "tensor" and p[name].shape[-1] > 1:
        with pytest.raises(RuntimeError, match=f"{said}is not contiguous"):
            call(**{**p, name: p[name].repeat_interleave(2, -1)[..., ::2]})


@pytest.mark.parametrize("op, wrong, said", [
    ("score", {"term": "cube"}, "term is 'cube', expected one of a, square, entropy"),
    ("score", {"reduce": "none"}, "reduce is 'none', expected one of sum, mean, max"),
    ("score", {"reduce": "max"}, "reduce is 'max', expected 'sum' or 'mean' with a weight or an entropy"),
    ("error", {"group": 3}, "group is 3, expected one of sum, mean, max, none"),
    ("error", {"alpha": float("nan")}, "alpha is nan, expected a number >= 0"),
    ("norm", {"p": 3}, r"p is 3, expected 1\.\.2"),
    ("attend_score", {"span": -2}, r"span is -2, expected -1\.\.2147483647"),
    ("attend_score", {"reduce": "max"}, "reduce is 'max', expected 'sum' or 'mean' with a weight or an entropy"),
    ("attend_score", {"observers": 10, "weight": None}, "observers is 10, expected at most the 9 rows of q"),
    ("attend_error", {"alpha": -1.0}, "alpha is -1, expected a number >= 0"),
])  # fmt: skip
def test_a_bad_option_is_a_value_error(op, wrong, said):
    with pytest.raises(ValueError, match=f"^kvevict.{op}: {said}$"):
        on_cpu(function(op), {**given(op), **wrong})


@pytest.mark.parametrize("op", [op for op in PUBLIC if op not in ("select", "linear")])
@pytest.mark.parametrize("bad", [3, "slots", torch.zeros(3, 8), (), None])
def test_what_is_not_held(op, bad):
    """Nor its parts, if they are not tensors; None where an op can do without stored slots."""
    for name in {"held", "src", "dst", "prefix"} & {*inspect.signature(function(op)).parameters}:
        p = {each: value for each, value in given(op).items() if not each.startswith(f"{name}_")} | {name: bad}
        if bad is None and (name == "prefix" or op == "kl"):
            on_cpu(function(op), p)
            continue
        with pytest.raises(TypeError, match=rf"(?s)^kvevict.{op}: {name} is .*, expected a kvevict\.ops\._ops\.Held$"):
            on_cpu(function(op), p)


@pytest.mark.parametrize("other", ["k", "v", "pos", "src_v", "index", "keep"])
def test_what_is_written_shares_no_memory(other):
    """Except with its source; keys do not share memory with values, either."""
    p = given("compact")
    dst = "dst_pos" if p[other].dtype == torch.int32 else "dst_k"
    p[other] = p[dst].view(-1)[: p[other].numel()].view(p[other].shape)
    before = copied(p, dst)
    written, read = shown("compact", dst), shown("compact", other)
    with pytest.raises(RuntimeError, match=f"{written}, which is written, and {read} share memory"):
        on_cpu(ops.compact, p)
    assert torch.equal(p[dst], before[dst])


def test_compiled():
    """In one graph, with fake tensors for the shapes."""

    def run(p):
        out, lse = ops.attend(**p["attend"])
        probs = ops.decode(**p["decode"])[2]
        return out + 1, lse, ops.score(**p["score"]) * 2, ops.norm(**p["norm"]), probs

    args = {op: named(function(op), given(op)) for op in ("attend", "decode", "score", "norm")}
    for got, want in zip(torch.compile(run, fullgraph=True, backend="aot_eager")(args), run(args), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    "argument, kernels",
    [("squared", ["refine_cpu.c", "refine_cuda.cu"]), ("protect_last", ["check.c", "select_cpu.c", "select_cuda.cu"])],
)
def test_an_argument_is_written_in_four_places(argument, kernels):
    """csrc/README.md, "To add an op": struct, table, kernel and check, signature."""
    sources = [file for file in (ROOT / "csrc").iterdir() if file.suffix != ".md"]
    files = [*sources, ROOT / "kvevict/ops/_ops.py", ROOT / "kvevict/ops/_native.py"]
    found = {file.name for file in files if re.search(rf"\b{argument}\b", file.read_text())}
    assert found == {"kvevict.h", "ops.def", "_ops.py", *kernels}
