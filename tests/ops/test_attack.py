"""Calls and processes that no honest program makes: each is refused, none crashes or goes wrong silently."""

import importlib.util
import os
import shutil
import subprocess
import sys

import pytest
import torch
from helpers import on_cpu
from problems import copied, i32, problem

from kvevict.ops import _ops as ops

BIG = 2**32  # what int32 cuts to 0


def raw(name, p):
    """The op's positional arguments, as binding.cpp gets them."""
    op = getattr(torch.ops.kvevict, name).default
    return op, {a.name: p.get(a.name, 0 if a.name.endswith("_kind") else None) for a in op._schema.arguments}


def observed():
    p = problem(1, lens=3, first=0, layout="dense")
    out, lse = on_cpu(ops.attend, {**p, "stop": None})
    more = dict(lse=lse, weight=None, causal=True, term=0, reduce=0, group=0, kind=0, alpha=0.0, o=out, columns=64)
    return {**p, **more, "x": p["k"], "p": 1}


@pytest.mark.parametrize(
    "name, option",
    [("score", "group"), ("score", "term"), ("score", "reduce"), ("error", "kind"), ("error", "group"), ("norm", "p")],
)
@pytest.mark.parametrize("value", [BIG, BIG + 1, BIG + 3, -1, 4])
def test_an_option_is_not_cut_to_another(name, option, value):
    op, args = raw(name, observed())
    op(*args.values())
    with pytest.raises(RuntimeError, match=f"{option} is {value}"):
        op(*{**args, option: value}.values())


@pytest.mark.parametrize("name", ["score", "norm", "select", "decode", "kl"])
@pytest.mark.parametrize("columns", [2**62, 2**63 - 1])
def test_more_columns_than_there_is_memory(name, columns):
    p = observed() | {"target": torch.rand(2, 4, 5), "score": torch.rand(2, 2, 8), "protect_first": i32([0, 0])}
    p |= {"protect_last": i32([0, 0]), "n": i32([[8, 8]] * 2), "keep": i32([[4, 4]] * 2)}
    if name == "decode":
        p |= {x: p[x][:, :, :1] for x in "qkv"} | {"pos": p["pos"][:, :1]}
    op, args = raw(name, p)
    with pytest.raises(RuntimeError):
        op(*{**args, "columns": columns}.values())


def decoding(seed=2):
    p = problem(seed, T=1, S=1, lens=[[3, 5], [4, 2]], first=0, layout="dense")
    return {k: p[k] for k in ["q", "k", "v", "pos", "held_k", "held_v", "held_pos", "held_offset", "held_len", "scale"]}


def compacting():
    p = problem(3, lens=[[3, 5], [4, 2]], first=0, layout="dense")
    p = {k: p[k] for k in ["k", "v", "pos", "first", "held_offset", "held_len", "held_k", "held_v", "held_pos"]}
    p = {name.replace("held_", "src_"): value for name, value in p.items()}
    dst = dict(dst_k=torch.zeros(64, 64), dst_v=torch.zeros(64, 64), dst_pos=torch.zeros(64, dtype=torch.int32))
    keep, offset = torch.full((2, 2), 3, dtype=torch.int32), torch.arange(0, 16, 4).view(2, 2)
    return {**p, **dst, "keep": keep, "dst_offset": offset, "index": None}


def test_heads_that_would_write_each_others_rows():
    p = decoding()
    on_cpu(ops.decode, p)
    flat = p["held_offset"].flatten()
    for one, other in ((0, 1), (3, 0), (2, 1)):
        offset = flat.clone()
        offset[one] = offset[other]
        with pytest.raises(RuntimeError, match="share rows"):
            on_cpu(ops.decode, {**p, "held_offset": offset.view(2, 2)})
    p = compacting()
    on_cpu(ops.compact, p)
    on_cpu(ops.compact, {**p, "dst_offset": p["dst_offset"].flip(0, 1).contiguous()})  # in any order
    with pytest.raises(RuntimeError, match="share rows"):
        on_cpu(ops.compact, {**p, "dst_offset": torch.tensor([[0, 6], [8, 2]])})
    on_cpu(ops.compact, {**p, "dst_offset": torch.zeros_like(p["dst_offset"]), "keep": torch.zeros_like(p["keep"])})


def test_slots_that_lie_in_what_is_read():
    p = decoding()
    rows = p["held_k"][:4].view(2, 2, 1, 64)
    slots = copied(p, "held_k")["held_k"]
    for wrong in ({"k": rows}, {"v": rows}, {"q": p["held_v"][:8].view(2, 4, 1, 64)}, {"held_v": p["held_k"]}):
        with pytest.raises(RuntimeError, match="share memory"):
            on_cpu(ops.decode, {**p, **wrong})
    assert torch.equal(slots.nan_to_num(), p["held_k"].nan_to_num())
    p = compacting()
    new = p["k"].contiguous()
    wrongs = {"dst_k": new.view(-1, 64), "dst_v": new.view(-1, 64), "dst_pos": p["pos"].view(-1)}
    for name, dst in wrongs.items():
        with pytest.raises(RuntimeError):
            on_cpu(ops.compact, {**p, "k": new, name: dst})
    with pytest.raises(RuntimeError, match="share memory"):
        on_cpu(ops.compact, {**p, "dst_v": p["dst_k"]})


def misaligned(t):
    """The same numbers one byte past a multiple of their size."""
    data = bytearray(1) + bytearray(t.contiguous().view(torch.uint8).numpy().tobytes())
    return torch.frombuffer(data, dtype=t.dtype, offset=1).view(t.shape)


def test_tensors_that_start_within_a_number():
    p = dict(decoding(), sinks=torch.zeros(4))
    on_cpu(ops.decode, p)
    for name in (name for name, value in p.items() if isinstance(value, torch.Tensor)):
        shown, size = name.replace("held_", "held."), p[name].element_size()
        with pytest.raises(RuntimeError, match=rf"decode: {shown} does not start at a multiple of .* {size} bytes"):
            on_cpu(ops.decode, {**p, name: misaligned(p[name])})


def test_autograd_sees_what_was_overwritten():
    for op, args, names in ((ops.decode, decoding(), "kv"), (ops.compact, compacting(), "kv")):
        for name in names:
            slots = args[f"held_{name}" if op is ops.decode else f"dst_{name}"]
            leaf = torch.ones_like(slots, requires_grad=True)
            product = (leaf * slots).sum()
            on_cpu(op, args)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                product.backward()


def run(code, **env):
    env = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)


def test_an_instruction_set_that_does_not_exist():
    code = """
import torch
from kvevict.ops import _ops as ops
for call in (ops.cpu_isa, lambda: ops.select(torch.rand(1, 1, 4), *[torch.full((1, 1), 2, dtype=torch.int32)] * 2,
                                             *[torch.zeros(1, dtype=torch.int32)] * 2, columns=2)):
    try:
        call()
    except (ValueError, RuntimeError) as error:
        print(error)
"""
    told = run(code, KVEVICT_CPU_ISA="garbage").stdout.splitlines()
    assert told[0] == f"KVEVICT_CPU_ISA is 'garbage', expected one of: {ops._C.cpu_isas()}"
    assert "KVEVICT_CPU_ISA" in told[1] and len(told) == 2
    assert run(code, KVEVICT_CPU_ISA="").stdout == ""


def test_a_second_copy_of_the_extension(tmp_path):
    copy = shutil.copy(ops._C.__file__, tmp_path)
    code = f"""
import importlib.util
from kvevict.ops import _ops
spec = importlib.util.spec_from_file_location("kvevict._C", {str(copy)!r})
try:
    importlib.util.module_from_spec(spec)
except ImportError as error:
    print(error)
import torch
print(_ops.cpu_isa() == _ops._C.cpu_isa())
"""
    done = run(code)
    assert done.stdout.splitlines() == ["another copy of kvevict's compiled part is in use in this process", "True"]
    assert done.returncode == 0, done.stderr
    spec = importlib.util.spec_from_file_location("kvevict._C", ops._C.__file__)
    assert importlib.util.module_from_spec(spec).cpu_isa() == ops.cpu_isa()  # the same copy again is fine
