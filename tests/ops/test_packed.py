"""Slots of 8 and 4 bits: the stored bytes by their definition, and every op's oracle on the numbers that the bytes
stand for."""

import itertools
import random

import helpers
import problems
import pytest
import ref
import torch
from helpers import OUT, call, close, opcheck, same_bits, same_for_threads
from op_cases import attend, error, kl, norm, peak, quadratic, refine, score
from op_cases.compact import DST
from op_cases.compact import prepared as moving
from op_cases.decode import SLOTS, forked, sharing
from op_cases.decode import prepared as decoding
from problems import DTYPES, INF, NAN, copied, fuzz, i32, matrix, problem

from kvevict.ops import _ops as ops

BITS = {0: 0, ref.INT8: 8, ref.INT4: 4}  # of a kind's numbers; 0: as computed
# Of keys and of values.
KINDS = [(ref.INT8, ref.INT8), (ref.INT8, ref.INT4), (ref.INT4, ref.INT4), (0, ref.INT8), (ref.INT4, 0)]
CHECKED = (attend, error, kl, peak, quadratic, refine, score)

# Where processors multiply pairs of bf16, a packed row is rounded to bf16 as it is read: by 2^-9 of each number, so by
# at most this of a logit. The model's rows in bf16 have the same error.
PAIRS = 2.0**-8
# Few rows on many slots multiply words (csrc/words.h): queries and weights are rounded by 2^-16 of their largest
# number, a logit by about 2^-16 |q| |k| scale ; 2^-13 is the most seen, at D = 512.
WORDS = 2.0**-12

# The CUDA kernels round packed rows to the dtype of the call where they multiply matrices.
OF_TILES = {torch.float32: WORDS, torch.bfloat16: PAIRS, torch.float16: PAIRS / 8}


def by_cuda():
    return helpers.device.type == "cuda" or ops.cpu_isa() == "CUDA on a CPU"


def row_bytes(kind, dim):
    return dim * BITS[kind] // 8 + 4


def pack(p, kinds, seed=0, centred=True, held="held"):
    """The problem with its stored slots packed, keys around a centre far from 0; between heads are random bytes."""
    gen, rng, (B, Hkv), D = torch.Generator().manual_seed(seed), random.Random(seed), p[f"{held}_len"].shape, None
    p, D = dict(p), p["k"].shape[3]
    centre = 3 * torch.randn(B, Hkv, D, generator=gen) if centred else None
    p[f"{held}_centre"] = centre
    for name, kind in zip("kv", kinds, strict=True):
        if not kind:
            continue
        rows = p[f"{held}_{name}"]
        packed = torch.randint(0, 256, (len(rows), row_bytes(kind, D)), dtype=torch.uint8, generator=gen)
        for b, h in [(b, h) for b in range(B) for h in range(Hkv)]:
            at = slice(int(p[f"{held}_offset"][b, h]), int(p[f"{held}_offset"][b, h] + p[f"{held}_len"][b, h]))
            c = centre[b, h].double() if centred and name == "k" else 0.0
            packed[at] = ref.packed(rows[at].double() + c, kind, c)
        if rng.random() < 0.5 and not by_cuda():  # an address that is not a multiple of 4
            packed = torch.cat([packed.flatten()[:1], packed.flatten()])[1:].view(packed.shape)
        p[f"{held}_{name}"], p[f"{held}_{name}_kind"] = packed, kind
    if centred:  # new keys have the same bias; queries see it
        p["k"] = p["k"] + centre[:, :, None].to(p["k"].dtype)
    return p


def rounded(monkeypatch, p):
    """Widens the checks where the kernels round packed rows to 16 bits."""
    dtype = p["q"].dtype
    if dtype == torch.float32 or not (by_cuda() or (dtype == torch.bfloat16 and ops.cpu_isa().endswith("bf16"))):
        monkeypatch.setattr(attend, "FP32", WORDS)
        monkeypatch.setattr(attend, "OUT", {dtype: bound + WORDS for dtype, bound in OUT.items()})
        return
    size = OF_TILES[dtype] * (1.0 if p["held_centre"] is None else 4.0)  # of a key's numbers
    for module in CHECKED:
        monkeypatch.setattr(module, "FP32", size)
    monkeypatch.setattr(attend, "OUT", {**OUT, dtype: 2 * size})
    monkeypatch.setattr(kl, "GRAD", {**kl.GRAD, dtype: 8 * size})


def as_stored(x, rows, kind, centre=None):
    """Whether bytes `rows` are what the rows x [n, d] are stored as: the scale and the least number to their last bit,
    the others the nearest, or either of two that are as near."""
    d, x = x.shape[1], x.double() - (0 if centre is None else centre.double())
    bad = ~x.isfinite().all(1)
    assert ref.unpacked(rows[bad], d, kind).isnan().all()
    x, rows = x[~bad], rows[~bad]
    want = ref.packed(x, kind)
    if kind == ref.INT8:
        ends, want_ends = (t[:, d:].clone().view(torch.float32).double() for t in (rows, want))
        assert ((ends - want_ends).abs() <= 2.0**-23 * want_ends + 2.0**-149).all()
        number, least, most = rows[:, :d].clone().view(torch.int8).double(), 0.0, 127
        assert (number.abs() <= 127).all()
    else:
        x = x @ ref.hadamard(d)
        ends, want_ends = (t[:, d // 2 :].clone().view(torch.float16).double() for t in (rows, want))
        assert torch.equal(ends.isnan(), want_ends.isnan())
        assert not ((ends - want_ends).abs() > 2.0**-10 * want_ends.abs() + 2.0**-24).any()
        number, most = torch.cat([rows[:, : d // 2] & 15, rows[:, : d // 2] >> 4], 1), 15
        ends, least = ends.split(1, 1)
    exact = (x - least) / ends.where(ends > 0, INF)
    off = (exact.clamp(-127 if kind == ref.INT8 else 0, most) - number).abs()
    assert not (off > 0.5 + 1e-4 + 1e-6 * exact.abs()).any()


def cases(op_of):
    return pytest.mark.parametrize("kinds", KINDS, ids=lambda kinds: str(tuple(BITS[kind] for kind in kinds)))(op_of)


@cases
@pytest.mark.drawn(24)
@pytest.mark.quick(case=0, dtype=torch.float32)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", range(8))
def test_matches(case, dtype, kinds, monkeypatch):
    """Every op that reads slots; odd cases without a centre."""
    p = pack(matrix(case, dtype, T=17), kinds, case, case % 2 == 0)
    rounded(monkeypatch, p)
    attend.check(p | {"stop": None})
    score.check(score.prepared(p, case % 2 == 0, score.REDUCE[case % 3]) | dict(group="mean"))
    peak.check(peak.prepared(p, case, case % 2 == 0))
    error.check(error.prepared(p, error.KINDS[case % 3], case % 2 == 0, case))
    of_kl = kl.prepared(p, case, case % 2 == 0)
    if by_cuda():  # the gradient reads slots as computed
        close(call(ops.kl, of_kl), call(ref.kl, of_kl).double(), 4 * kl.FP32, least=0.1)
    else:
        kl.check(of_kl)
    refine.check(refine.prepared(p, case, fast=case % 2 == 0, squared=case % 3 == 0))
    of = "kv"[case // 2 % 2]
    centre = dict(held_centre=p["held_centre"] if of == "k" else None)
    norm.check(norm.prepared(p, of, 1 + case % 2) | centre)
    quadratic.check(quadratic.prepared(p, of, case) | centre)


@pytest.mark.parametrize("seed", range(40))
def test_attend_fuzz(seed, monkeypatch):
    p = pack(fuzz(seed), KINDS[seed % len(KINDS)], seed, seed % 4 > 1)
    rounded(monkeypatch, p)
    attend.check(p | {"stop": None})
    score.check(score.prepared(p, seed % 2 == 0, "sum") | dict(group="none"))


def decoded(p, kinds):
    """A step of decode against the oracle on the slots as they are after it."""
    before, shared, (B, Hkv) = copied(p, *SLOTS), copied(forked(p), *SLOTS), p["held_len"].shape
    out, lse, probs = call(ops.decode, p)
    at = p["held_offset"] + p["held_len"]
    for b, h in [(b, h) for b in range(B) for h in range(Hkv)]:
        for name, kind in zip("kv", kinds, strict=True):
            row, new = p[f"held_{name}"][at[b, h]][None], p[name][b, h]
            centre = p["held_centre"][b, h] if name == "k" and p["held_centre"] is not None else None
            assert same_bits(row, new) if not kind else as_stored(new, row, kind, centre) is None
            before[f"held_{name}"][at[b, h]] = row
        before["held_pos"][at[b, h]] = p["pos"][b, 0]
    assert all(same_bits(p[name], before[name]) for name in SLOTS)  # every other row as it was
    grown, none = p | {"held_len": p["held_len"] + 1}, torch.zeros(B, dtype=torch.int32)
    grown |= {"k": p["k"][:, :, :0], "v": p["v"][:, :, :0], "first": none, "stop": none, "row_first": none}
    want, want_lse = call(ref.attend, grown | {"stop": None})
    bound = WORDS
    seen = grown | dict(causal=False, reduce="sum", group="mean", lse=want_lse)

    def check(out, lse, probs):
        close(out, want, OUT[out.dtype] + bound)
        close(lse, want_lse, bound, least=1.0)
        if p["columns"]:
            close(probs, call(ref.score, seen), 2 * bound)

    check(out, lse, probs)
    results = call(ops.decode, shared)
    assert all(same_bits(shared[name], p[name]) for name in SLOTS)
    if by_cuda():
        check(*results)
    else:  # where the slots lie changes no bit
        assert all(same_bits(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(results, (out, lse, probs), strict=True))


@cases
@pytest.mark.drawn(40)
@pytest.mark.quick(case=0, dtype=torch.float32)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", range(8))
def test_decode(case, dtype, kinds):
    p = pack(matrix(case, dtype, T=1, first=0), kinds, case, case % 2 == 0)
    decoded(decoding(p), kinds)


@pytest.mark.parametrize("seed", range(40))
def test_decode_fuzz(seed):
    kinds = KINDS[seed % len(KINDS)]
    decoded(decoding(pack(fuzz(seed, T=1, S=1, first=0), kinds, seed, seed % 4 > 1), seed % 3 > 0), kinds)


@cases
@pytest.mark.drawn(6)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_share_a_prefix(dtype, kinds):
    """The bits of rows that each have a prefix of their own, packed around the same centre."""
    p = pack(problem(6, B=4, G=3, Hkv=1, T=1, first=0, lens=[[700], [710], [650], [704]], dtype=dtype), kinds)
    for less in (0, i32([[0], [0], [70], [1]])):
        _, apart, shared = sharing(decoding(p), [0, 1, 0, 0], i32([[640], [700]]), less)
        results, wanted = (call(ops.decode, copied(x, *SLOTS)) for x in (shared, apart))
        assert all(same_bits(got, want) for got, want in zip(results, wanted, strict=True))


@cases
@pytest.mark.drawn(6)
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_blocks(dtype, kinds):
    p = problem(1, B=1, G=4, Hkv=3, T=1, first=0, lens=[[3003, 0, 777]], dtype=dtype)
    decoded(decoding(pack(p, kinds)), kinds)


def compacted(p):
    """After `compact`, of every head (b, h, its rows of dst, the stored rows, the new ones): positions are right, and
    nothing else was written."""
    before, untouched, found = copied(p, *DST), torch.ones(len(p["dst_k"]), dtype=torch.bool), []
    call(ops.compact, p)
    for b, h in itertools.product(range(2), repeat=2):
        n, to, length = int(p["keep"][b, h]), int(p["dst_offset"][b, h]), int(p["src_len"][b, h])
        index, untouched[to : to + n] = p["index"][b, h, :n].long(), False
        old = index[index < length] + p["src_offset"][b, h]
        new = index[index >= length] - length + int(p["first"][b])
        assert torch.equal(p["dst_pos"][to : to + n], torch.cat([p["src_pos"][old], p["pos"][b, new]]))
        found.append((b, h, slice(to, to + n), old, new))
    assert all(same_bits(p[name][untouched], before[name][untouched]) for name in DST)
    return found


@cases
@pytest.mark.parametrize("dtype", DTYPES)
def test_compact(dtype, kinds):
    """Stored rows move as they are; new ones, and stored ones as computed, are packed by their definition."""
    for seed in range(4):
        plain = problem(seed, dtype=dtype, D=(64, 40, 128, 8)[seed], first=[0, 3], layout=problems.LAYOUTS[seed])
        for src in (pack(plain, kinds, seed, seed % 2 == 0), plain):
            p = moving(src, seed)
            p["dst_centre"] = pack(plain, kinds, seed, seed % 2 == 0)["held_centre"]
            for name, kind in zip("kv", kinds, strict=True):
                p[f"dst_{name}_kind"] = kind
                if kind:
                    shape = len(p["dst_k"]), row_bytes(kind, p["k"].shape[3])
                    p[f"dst_{name}"] = torch.randint(0, 256, shape, dtype=torch.uint8)
            for b, h, at, old, new in compacted(p):
                for name, kind in zip("kv", kinds, strict=True):
                    rows, stored, fresh = p[f"dst_{name}"][at], p[f"src_{name}"][old], p[name][b, h, new]
                    moved = stored.dtype == rows.dtype
                    centre = p["dst_centre"][b, h] if name == "k" and p["dst_centre"] is not None else None
                    if moved:
                        assert same_bits(rows[: len(old)], stored)
                        rows = rows[len(old) :]
                    else:
                        fresh = torch.cat([stored, fresh])
                    if kind:
                        as_stored(fresh, rows, kind, centre)
                    else:
                        assert same_bits(rows, fresh)


@cases
@pytest.mark.parametrize("dtype", DTYPES)
def test_compact_unpacks(dtype, kinds):
    """Stored rows become the numbers that they stand for, to the dtype's last bit; new ones move as they are."""
    for seed in range(4):
        plain = problem(seed, dtype=dtype, D=(64, 40, 128, 8)[seed], first=[0, 3], layout=problems.LAYOUTS[seed])
        p = moving(pack(plain, kinds, seed, seed % 2 == 0), seed)
        for name in "kv":
            p[f"dst_{name}"], p[f"dst_{name}_kind"] = plain["k"].new_full((len(p["dst_k"]), p["k"].shape[3]), NAN), 0
        for b, h, at, old, new in compacted(p):
            for name, kind in zip("kv", kinds, strict=True):
                rows, stored = p[f"dst_{name}"][at], p[f"src_{name}"][old]
                if kind:
                    centred = name == "k" and p["src_centre"] is not None
                    centre = p["src_centre"][b, h].double() if centred else 0.0
                    want = ref.unpacked(stored, rows.shape[1], kind, centre)
                    close(rows[: len(old)], want, torch.finfo(dtype).eps + 2.0**-20, least=0.1)
                else:
                    assert same_bits(rows[: len(old)], stored)
                assert same_bits(rows[len(old) :], p[name][b, h, new])


@cases
def test_compact_in_place(kinds):
    p = pack(problem(2, T=20, room=20, first=[0, 5]), kinds)
    out_of_place = moving(p, 2)
    for name, kind in zip("kv", kinds, strict=True):
        out_of_place[f"dst_{name}_kind"] = kind
        if kind:
            shape = len(out_of_place["dst_k"]), row_bytes(kind, 64)
            out_of_place[f"dst_{name}"] = torch.zeros(shape, dtype=torch.uint8)
    in_place = {**out_of_place, **{f"dst_{part}": p[f"held_{part}"] for part in ("k", "v", "pos", "offset", "centre")}}
    out_of_place["dst_centre"] = p["held_centre"]
    call(ops.compact, out_of_place)
    call(ops.compact, in_place)
    for b, h in [(b, h) for b in range(2) for h in range(2)]:
        n, to, at = int(in_place["keep"][b, h]), int(out_of_place["dst_offset"][b, h]), int(p["held_offset"][b, h])
        assert all(same_bits(in_place[name][at : at + n], out_of_place[name][to : to + n]) for name in DST)


WILD = {
    "zeros": lambda x: x * 0, "one number": lambda x: x * 0 + 3.5,
    "one large": lambda x: torch.where(torch.arange(x.shape[-1]) == 5, 6e4, x), "tiny": lambda x: x * 1e-7,
    "below normal": lambda x: x * 1e-42, "large": lambda x: x * 1e4, "over fp16": lambda x: x * 1e30,
    "infinity": lambda x: torch.where(torch.arange(x.shape[-1]) == 5, INF, x),
    "both infinities": lambda x: torch.where(torch.arange(x.shape[-1]) < 5, INF, -INF).expand_as(x).clone(),
    "NaN": lambda x: torch.where(torch.arange(x.shape[-1]) == 63, NAN, x),
    "the largest": lambda x: x * 0 + torch.finfo(torch.float32).max,
}  # fmt: skip


@pytest.mark.parametrize("kind", [ref.INT8, ref.INT4], ids=["8", "4"])
@pytest.mark.parametrize("wild", WILD)
def test_unusual_rows(wild, kind):
    """As defined, or a row of NaN, which only its own group sees."""
    p = problem(3, T=1, first=0, lens=[[9, 30], [17, 5]], layout="dense")
    for name in "kv":
        p[name] = WILD[wild](p[name])
    p = decoding(pack(p, (kind, kind), centred=False), probs=False)
    first = p | {"index": None, "keep": i32([[1, 1], [1, 1]]), "dst_offset": torch.arange(4).view(2, 2)}
    first |= {f"src_{part}": p[f"held_{part}"] for part in ("pos", "offset")} | {"dst_pos": i32([0] * 4)}
    first |= {"src_k": p["held_k"], "src_v": p["held_v"], "src_len": p["held_len"] * 0}
    first |= {f"dst_{name}": torch.full((4, row_bytes(kind, 64)), 9, dtype=torch.uint8) for name in "kv"}
    first |= {f"{held}_{name}_kind": kind for held in ("src", "dst") for name in "kv"}
    call(ops.compact, first)
    for i, name in [(i, name) for i in range(4) for name in "kv"]:
        x, row = p[name][i // 2, i % 2], first[f"dst_{name}"][i : i + 1]
        if ref.unpacked(ref.packed(x, kind), 64, kind).isnan().any():
            assert ref.unpacked(row, 64, kind).isnan().all()
        else:
            as_stored(x, row, kind)
            error = (ref.unpacked(row, 64, kind) - x.double()).abs().max()
            share, least = {ref.INT8: (0.004, 2.0**-142), ref.INT4: (0.6, 2.0**-18)}[kind]
            assert error <= x.double().abs().max() * share + least
    p["k"][1, 1] = 1.0  # one head without
    p["v"][1, 1] = 1.0
    out, _, _ = call(ops.decode, p)
    assert out[1, 0, 2:].isfinite().all()


@cases
def test_threads(kinds):
    p = pack(problem(6, B=1, G=4, Hkv=3, T=40, first=0, lens=[[1003, 1, 777]], dtype=torch.bfloat16), kinds)
    assert same_for_threads(lambda: call(ops.attend, p | {"stop": None}))
    p = pack(problem(6, B=1, G=4, Hkv=3, T=1, first=0, lens=[[5003, 1, 777]], dtype=torch.bfloat16), kinds)
    assert same_for_threads(lambda: call(ops.decode, copied(decoding(p), *SLOTS)))


WRONG = {
    "width": (lambda p: {"held_k": p["held_k"][:, :66].contiguous()}, r"held\.k has rows of 66 bytes, expected 68 for"),
    "width of values": (lambda p: {"held_v": p["held_v"][:, :35].contiguous()}, r"held\.v .* 35 .* 36 .* in kind 2"),
    "another kind": (lambda p: {"held_k_kind": ref.INT4}, r"held\.k has rows of 68 bytes, expected 36 for"),
    "no kind": (lambda p: {"held_k_kind": 0}, r"held\.k is torch\.uint8, expected torch\.float32"),
    "an unknown kind": (lambda p: {"held_k_kind": 3}, r"held\.k_kind is 3, expected 0\.\.2"),
    "numbers": (lambda p: {"held_v": torch.zeros(len(p["held_v"]), 64)}, r"held\.v is torch\.float32, .*uint8"),
    "a strided buffer": (lambda p: {"held_k": p["held_k"].repeat(1, 2)[:, :68]}, r"held\.k is not contiguous"),
    "shape of the centre": (lambda p: {"held_centre": torch.zeros(2, 2, 32)}, r"held\.centre has shape"),
    "queries": (lambda p: {"q": p["q"].to(torch.uint8)}, r"q is torch\.uint8, expected float32"),
    "int8": (lambda p: {"held_k": p["held_k"].view(torch.int8)}, r"held\.k is torch\.int8, expected torch\.uint8"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_errors(wrong):
    p, (change, said) = pack(problem(8, T=1, first=0, lens=3), (ref.INT8, ref.INT4)), WRONG[wrong]
    for op, given in ((ops.attend, p | {"stop": None}), (ops.decode, decoding(p))):
        with pytest.raises((RuntimeError, TypeError, ValueError), match=said):
            call(op, given | change(p))


def test_kinds_that_do_not_fit():
    p = pack(problem(8, T=1, first=0, lens=3), (ref.INT8, ref.INT8))
    with pytest.raises(RuntimeError, match="must be of the same kind"):
        other = {"prefix_k": p["held_k"][:, :36].contiguous(), "prefix_k_kind": ref.INT4}
        call(ops.decode, forked(decoding(p)) | other)
    with pytest.raises(RuntimeError, match="must be of the same kind"):
        moved = moving(p, 1)
        other = torch.zeros(len(moved["dst_k"]), 36, dtype=torch.uint8)
        call(ops.compact, moved | {"dst_k": other, "dst_k_kind": ref.INT4})


@cases
def test_opcheck(kinds):
    p = pack(problem(9, T=1, first=0), kinds)
    opcheck("attend", p | {"stop": None})
    opcheck("decode", decoding(p) | {"prefix_k": None})


@pytest.mark.skipif(ops.cpu_isa() == "CUDA on a CPU", reason="GPUs take head dimensions up to 256")
def test_the_largest_head_dimension(monkeypatch):
    for kinds in KINDS:
        p = pack(problem(5, B=1, D=512, T=3, lens=40, first=0), kinds)
        rounded(monkeypatch, p)
        attend.check(p | {"stop": None})
        decoded(decoding(pack(problem(5, B=1, D=512, T=1, lens=40, first=0), kinds)), kinds)


def test_bytes():
    """METHODS section 11: bytes a slot and head, keys and values with their scales."""
    for d, sizes in ((64, (136, 104, 72)), (128, (264, 200, 136))):
        for kinds, size in zip(KINDS, sizes):
            p = pack(problem(1, D=d), kinds)
            assert p["held_k"].shape[1] + p["held_v"].shape[1] == size
