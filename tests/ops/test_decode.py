import pytest
import ref
import torch
from helpers import FP32, OUT, call, close, guarded, opcheck, same_bits, same_for_threads
from op_cases.decode import PREFIX, SLOTS, check, forked, prepared, sharing, step
from problems import DTYPES, NAN, copied, fuzz, i32, matrix, of_matrix, problem, refuses

from kvevict.ops import _ops as ops


@of_matrix
def test_matches(case, dtype):
    check(prepared(matrix(case, dtype, T=1, first=0)))


@pytest.mark.parametrize("seed", range(40))
def test_fuzz(seed):
    check(prepared(fuzz(seed, T=1, S=1, first=0), probs=seed % 3 > 0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("G, D", [(3, 256), (5, 64), (6, 128), (7, 80), (9, 256), (16, 24), (17, 128), (71, 96)])
def test_groups(G, D, dtype):
    """Every number of heads a group; splits of a whole head, of one slot and of none before the new one."""
    check(step(10, B=1, G=G, Hkv=3, D=D, lens=[[389, 0, 1]], dtype=dtype, softcap=float(G % 3), sinks=G % 2 == 0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("G", [1, 4, 16])
def test_reads_nothing_past_a_prefix(G, dtype):
    """The prefix ends where its buffer does."""
    p = step(3, B=1, Hkv=1, G=G, lens=40, dtype=dtype)
    end = p["held_offset"] + p["held_len"]
    keys, values = (guarded(p[name][: int(end)]) for name in ("held_k", "held_v"))
    prefix = dict(prefix_k=keys, prefix_v=values, prefix_offset=p["held_offset"], prefix_len=p["held_len"])
    fork = {**copied(p, *SLOTS), **prefix, "held_offset": end, "held_len": p["held_len"] * 0}
    for got, want, tolerance in zip(call(ops.decode, fork), call(ref.decode, p), (OUT[dtype], FP32, 2 * FP32)):
        close(got, want, tolerance, least=1.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_blocks(dtype):
    """Long and very uneven heads: the work of one is split, another is a single slot."""
    check(step(1, B=1, G=4, Hkv=3, lens=[[5003, 0, 777]], dtype=dtype))


@pytest.mark.parametrize("G", [1, 3])
def test_many_heads(G):
    """So many that each head's slots are split into few parts, longer than with fewer heads."""
    lens = torch.ones(32, 16).int()
    lens[::16, ::8] = 1500
    check(step(1, B=32, G=G, Hkv=16, D=8, lens=lens, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_share_a_prefix(dtype):
    """More slots to read than the buffers have rows: all rows of the batch read the same prefix."""
    p = step(2, B=12, G=3, Hkv=1, lens=[[600 + n] for n in range(12)], dtype=dtype)
    for name in ("held_k", "held_v"):
        rows = p[name][p["held_offset"][0, 0] :][:600].clone()
        for at in p["held_offset"].flatten().tolist():
            p[name][at : at + 600] = rows
        p[name.replace("held", "prefix")] = rows
    shared = dict(prefix_offset=0 * p["held_offset"], prefix_len=0 * p["held_len"] + 600)
    shared |= dict(held_offset=p["held_offset"] + 600, held_len=p["held_len"] - 600)
    found, wanted = call(ops.decode, copied(p, *SLOTS) | shared), call(ref.decode, p | PREFIX)
    for got, want, tolerance in zip(found, wanted, (OUT[dtype], FP32, 2 * FP32)):
        close(got, want, tolerance, least=1.0)


TEXTS = [0, 1, 0, 0, 2, 1, 0, 3, 0]  # of each batch row
PREFIXES = i32([[1300, 64], [63, 600], [0, 1], [129, 0]])  # [text, h] slots


LESS = i32([[0, 0], [1, 9], [5, 60], [64, 1], [3, 0], [600, 0], [200, 0], [0, 0], [520, 0]])  # not in the row's prefix


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("less", [0, LESS], ids=["whole", "parts"])
@pytest.mark.parametrize("G, D", [(1, 64), (3, 64), (4, 128), (7, 40), (17, 16)])
def test_rows_share_prefixes(G, D, less, dtype):
    """The rows of a text get the bits that they get when each has a prefix of its own, also of different lengths."""
    own = torch.arange(2 * len(TEXTS)).view(-1, 2).int() * 29
    p = step(2, B=len(TEXTS), G=G, D=D, lens=PREFIXES[TEXTS] + own, dtype=dtype, sinks=G > 1, softcap=float(G == 3))
    whole, apart, shared = sharing(p, TEXTS, PREFIXES, less)
    (out, lse, probs), wanted = (call(ops.decode, copied(x, *SLOTS)) for x in (shared, apart))
    assert same_bits(out, wanted[0]) and same_bits(lse, wanted[1]) and same_bits(probs, wanted[2])
    for got, want, tolerance in zip((out, lse, probs), call(ref.decode, whole), (OUT[dtype], FP32, 2 * FP32)):
        close(got, want, tolerance, least=1.0)
    shared["columns"] = 0
    assert same_for_threads(lambda: call(ops.decode, copied(shared, *SLOTS)))
    assert same_bits(call(ops.decode, shared)[0], out)


@pytest.mark.parametrize("softcap, sinks", [(0.0, True), (0.7, False), (30.0, True)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_softcap_and_sinks(softcap, sinks, dtype):
    check(step(2, G=4, dtype=dtype, softcap=softcap, sinks=sinks))


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_attend(dtype):
    p = step(3, G=4, dtype=dtype, lens=[[500, 17], [0, 64]])
    out, lse = call(ops.attend, {**p, "stop": None})
    got, got_lse, probs = call(ops.decode, copied(p, *SLOTS))
    close(got, out.double(), 2 * OUT[dtype])
    close(got_lse, lse.double(), FP32, least=1.0)
    close(probs.double().sum(-1), torch.ones(2, 2, dtype=torch.double), FP32)
    again, again_lse, none = call(ops.decode, {**copied(p, *SLOTS), "columns": 0})
    assert same_bits(again, got) and same_bits(again_lse, got_lse) and none.shape == (2, 2, 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_steps(dtype):
    """Each step sees the rows that the earlier ones wrote."""
    p, gen = step(4, dtype=dtype, room=5, layout="dense"), torch.Generator().manual_seed(4)
    for _i in range(5):
        for name in "qkv":
            p[name] = torch.randn(p[name].shape, generator=gen).to(dtype)
        p["pos"] = p["pos"] + 1
        check(prepared(p))
        call(ops.decode, prepared(p))
        p["held_len"] = p["held_len"] + 1
    at = p["held_offset"] + p["held_len"] - 1
    assert (p["held_pos"][at] == p["pos"]).all()


@pytest.mark.parametrize("where", ["held_k", "held_v", "k", "v"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_reaches_only_its_group(where, dtype):
    p = step(5, dtype=dtype, lens=[[9, 30], [17, 5]], layout="dense")
    if where.startswith("held"):
        p[where][p["held_offset"][0, 1] + 3] = NAN
    else:
        p[where][0, 1] = NAN
    out, _, probs = check(p)
    assert out[0, 0, 2:].isnan().all() and out[0, 0, :2].isfinite().all() and out[1].isfinite().all()
    assert probs[0, 0].isfinite().all() and probs[0, 1, :31].isnan().all() == where.endswith("k")


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads(dtype):
    p = step(6, B=1, G=4, Hkv=3, lens=[[5003, 1, 777]], dtype=dtype)
    assert same_for_threads(lambda: call(ops.decode, copied(p, *SLOTS)))


def test_empty_batch():
    p = problem(7, B=0, T=1, lens=0)
    out, lse, probs = call(ops.decode, {**p, "columns": 5})
    assert out.shape == (0, 1, 4, 64) and lse.shape == (0, 4, 1) and probs.shape == (0, 2, 5)


def last_head_has_no_room(p):
    rows = int((p["held_offset"] + p["held_len"]).max())
    return {name: p[name][:rows].contiguous() for name in SLOTS}


WRONG = {  # beside what test_table.py gives every argument
    "no room": last_head_has_no_room, "two rows": lambda p: {"q": p["q"].repeat(1, 1, 2, 1)},
    "two new columns": lambda p: {"k": p["k"].repeat(1, 1, 2, 1), "v": p["v"].repeat(1, 1, 2, 1)},
    "no new column": lambda p: {"k": p["k"][:, :, :0], "v": p["v"][:, :, :0]},
    "mixed dtypes": lambda p: {"v": p["v"].half()}, "pos shape": lambda p: {"pos": p["pos"][:1]},
    "len negative": lambda p: {"held_len": p["held_len"] * 0 - 1},
    "offset past the buffer": lambda p: {"held_offset": p["held_offset"] + 10**12},
    "offset negative": lambda p: {"held_offset": p["held_offset"] - 10**9},
    "columns under len + 1": lambda p: {"columns": int(p["held_len"].max())},
    "columns negative": lambda p: {"columns": -1}, "sinks length": lambda p: {"sinks": torch.zeros(3)},
    "3 query heads on 2": lambda p: {"q": p["q"][:, :3]}, "head dimensions differ": lambda p: {"q": p["q"][..., :56]},
    "offset shape": lambda p: {"held_offset": p["held_offset"][:1]},
    "half a prefix": lambda p: {"prefix_k": p["held_k"].clone()},
    "prefix past its buffer": lambda p: forked(
        {**p, "held_offset": p["held_offset"] + 10**6, "held_len": p["held_len"] * 0}),
    "prefix in the slots": lambda p: {**forked(p), "prefix_k": p["held_k"], "prefix_len": p["held_len"] + 1},
    "columns under those of the prefix too": lambda p: {**forked(p), "columns": int(p["held_len"].max())},
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_errors(wrong):
    """And nothing is written before the error."""
    refuses(ops.decode, check, step(8, lens=[[3, 1], [4, 2]], layout="dense"), WRONG[wrong], SLOTS)


@pytest.mark.parametrize("probs", [True, False])
def test_opcheck(probs):
    opcheck("decode", prepared(step(9), probs))
