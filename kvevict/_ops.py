"""The only door to csrc: the ops as functions with shapes, and what torch.compile has to know about them.

Dimensions are those of csrc/kvevict.h: B batch rows, H query heads, Hkv key/value heads, T query rows, R observing
rows, S new columns, D head dimension (a multiple of 8, at most 512, on a GPU 256), N rows of a flat slot buffer.

Slots are ragged: head h of batch row b owns rows offset[b, h] .. offset[b, h] + len[b, h] - 1 of the flat buffers. A
head's alive slots are [stored | new], new columns counting from first[b] (those before are left padding).
`offset` is int64; lengths, counts, indices and positions are int32; scores, lse, weights and sinks are float32. q, k, v
are float32, float16 or bfloat16 with any strides. All tensors of a call are on one device, the CPU or, in a build with
CUDA, a GPU, whose current stream runs the op. A wrong dtype raises TypeError, a wrong device or option ValueError,
anything else (shapes, counts, slots outside their buffer) RuntimeError, before any slot is written; on a GPU counts,
offsets and indices are not looked at, as that would wait for it. Only `kl` has a backward.
"""

import re
from typing import TypeAlias

try:
    import torch
except ImportError as missing:
    raise ImportError("kvevict needs PyTorch: pip install 'torch>=2.10'") from missing

if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < (2, 10):
    raise ImportError(f"kvevict needs torch 2.10 or newer, this is {torch.__version__}: pip install -U torch")

try:
    from kvevict import _C
except ImportError as failed:
    raise ImportError(
        f"kvevict's compiled part cannot be loaded ({failed}). Build it for this Python and torch: "
        "pip install --no-build-isolation . (in the source tree: pip install --no-build-isolation -e .)"
    ) from failed

Tensor: TypeAlias = torch.Tensor

REDUCE = {"sum": 0, "mean": 1, "max": 2}  # kv_reduce
GROUP = {**REDUCE, "none": 3}
TERM = {"a": 0, "square": 1, "entropy": 2}  # kv_term
ERROR = {"edie": 0, "l1": 1, "l2": 2}  # kv_error_kind

_attend = torch.ops.kvevict.attend.default
_score = torch.ops.kvevict.score.default
_peak = torch.ops.kvevict.peak.default
_error = torch.ops.kvevict.error.default
_kl = torch.ops.kvevict.kl.default
_kl_grad = torch.ops.kvevict.kl_grad.default
_refine = torch.ops.kvevict.refine.default
_norm = torch.ops.kvevict.norm.default
_select = torch.ops.kvevict.select.default
_compact = torch.ops.kvevict.compact.default
_decode = torch.ops.kvevict.decode.default

_NONE = torch.empty(0)  # stands for an absent tensor
_NO_INDEX = torch.empty(0, dtype=torch.int32)

# What is not listed has the dtype of q, or of k where there is no q.
_INT32 = "len n keep index first stop row_first lo hi pos protect_first protect_last src_len pos_src pos_dst pos_slots"
_DTYPES = dict.fromkeys(_INT32.split(), torch.int32)
_DTYPES |= dict.fromkeys(("offset", "src_offset", "dst_offset"), torch.int64)
_DTYPES |= dict.fromkeys(("score", "lse", "sinks", "weight", "target", "paid", "grad"), torch.float32)
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def _explain(op, error: RuntimeError, args: tuple) -> Exception:
    """The exception that says best why a call failed. Looked for only then: a decode step pays nothing for it."""
    tensors = {a.name: t for a, t in zip(op._schema.arguments, args) if isinstance(t, Tensor) and t.numel()}
    lead = next((tensors[name] for name in "qkvx" if name in tensors), next(iter(tensors.values()), None))
    name = op._schema.name.replace("::", ".")
    for arg, t in tensors.items():
        if t.device != lead.device:
            return ValueError(f"{name}: {arg} is on {t.device}, the others on {lead.device}")
        want = _DTYPES.get(arg, lead.dtype)
        if t.dtype != want:
            return TypeError(f"{name}: {arg} is {t.dtype}, expected {want}")
        if arg not in _DTYPES and t.dtype not in _FLOATS:
            return TypeError(f"{name}: {arg} is {t.dtype}, there are kernels for float32, float16 and bfloat16")
    kind = lead.device.type if lead is not None else "cpu"
    if isinstance(error, NotImplementedError) and kind != "cpu":
        return ValueError(f"{name}: this build has no {kind.upper()} kernels; move the model and its inputs to the CPU")
    return RuntimeError(f"{name}: " + re.sub(r"^\w+, \S+:\d+, ", "", str(error)))  # without the place in binding.cpp


def _call(op, args: tuple):
    try:
        return op(*args)
    except RuntimeError as error:
        raise _explain(op, error, args) from None


def _written(*tensors: Tensor) -> None:
    """Lets autograd refuse to use what an op has overwritten. Costs a microsecond, so not where nothing is recorded."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version(tensors)


def _one_of(name: str, value: str, table: dict) -> int:
    if value not in table:
        raise ValueError(f"kvevict.{name} is {value!r}, expected one of {', '.join(table)}")
    return table[value]


def attend(
    q: Tensor,
    k_slots: Tensor,
    v_slots: Tensor,
    offset: Tensor,
    len: Tensor,
    k: Tensor,
    v: Tensor,
    first: Tensor,
    sinks: Tensor | None = None,
    stop: Tensor | None = None,
    *,
    scale: float,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attention over [stored | new]: row t sees every stored slot and new columns first[b] <= j <= t + S - T. With
    `stop` rows are not causal: each sees new columns first[b] <= j < stop[b].

    q [B,H,T,D]  k_slots v_slots [N,D]  offset len [B,Hkv]  k v [B,Hkv,S,D]  first [B]  sinks [H] or None
    stop [B] or None
    -> out [B,T,H,D], lse [B,H,T]; a row that sees nothing gets 0 and -inf.
    """
    sinks, stop = _NONE if sinks is None else sinks, _NO_INDEX if stop is None else stop
    args = (q, k_slots, v_slots, offset, len, k, v, first, stop, sinks, scale, softcap)
    return _call(_attend, args)


def score(
    q: Tensor,
    row_first: Tensor,
    k_slots: Tensor,
    offset: Tensor,
    len: Tensor,
    k: Tensor,
    first: Tensor,
    stop: Tensor,
    lse: Tensor | None = None,
    sinks: Tensor | None = None,
    weight: Tensor | None = None,
    *,
    scale: float,
    softcap: float = 0.0,
    causal: bool = False,
    term: str = "a",
    reduce: str,
    group: str = "mean",
    columns: int,
) -> Tensor:
    """Attention a that the rows row_first[b] <= r < R of q pay to every alive slot (term "a"), its "square", or -a ln a
    ("entropy"), times the row's weight: reduced ("sum", "mean" or "max") over rows, then over the heads of a group
    ("mean", "sum", "max" or "none"). causal: the rows are the last R alive slots' own. lse is the rows' own from
    `attend`, or None to take it over the columns seen here (sinks count then only). reduce="max" has no weight and no
    entropy.

    q [B,H,R,D]  row_first [B]  k_slots [N,D]  offset len [B,Hkv]  k [B,Hkv,S,D]  first stop [B]  lse weight [B,H,R]
    sinks [H]
    -> [B,Hkv,columns], [B,H,columns] if group is "none"; columns >= the largest number of alive slots; 0 past a head's
    own.
    """
    reduction, heads = _one_of("score: reduce", reduce, REDUCE), _one_of("score: group", group, GROUP)
    if reduce == "max" and (weight is not None or term == "entropy"):
        raise ValueError("kvevict.score: reduce='max' has no weight and no entropy; reduce by 'sum' or 'mean'")
    lse, sinks, weight = (_NONE if x is None else x for x in (lse, sinks, weight))
    args: tuple = (q, row_first, k_slots, offset, len, k, first, stop, lse, sinks, weight, scale, softcap)
    args += (causal, _one_of("score: term", term, TERM), reduction, heads, columns)
    return _call(_score, args)


def peak(
    q: Tensor,
    row_first: Tensor,
    k_slots: Tensor,
    offset: Tensor,
    len: Tensor,
    k: Tensor,
    first: Tensor,
    stop: Tensor,
    lo: Tensor,
    hi: Tensor,
    lse: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    scale: float,
    softcap: float = 0.0,
    causal: bool = False,
) -> Tensor:
    """The largest attention that each row of q pays to one of the slots lo[b,h] <= i < hi[b,h] (EDIE eq. 10); 0 where
    there is none that it sees, and for rows before row_first[b]. Rows, slots and lse are those of `score`.

    lo hi [B,Hkv], 0 <= lo <= hi <= the head's alive slots -> [B,H,R]
    """
    lse, sinks = _NONE if lse is None else lse, _NONE if sinks is None else sinks
    args = (q, row_first, k_slots, offset, len, k, first, stop, lo, hi, lse, sinks, scale, softcap, causal)
    return _call(_peak, args)


def error(
    q: Tensor,
    row_first: Tensor,
    k_slots: Tensor,
    v_slots: Tensor,
    offset: Tensor,
    len: Tensor,
    k: Tensor,
    v: Tensor,
    first: Tensor,
    stop: Tensor,
    o: Tensor,
    lse: Tensor | None = None,
    sinks: Tensor | None = None,
    weight: Tensor | None = None,
    *,
    scale: float,
    softcap: float = 0.0,
    causal: bool = False,
    kind: str,
    alpha: float = 0.0,
    group: str = "sum",
    columns: int,
) -> Tensor:
    """How far the rows' attention outputs move when one slot is removed, per alive slot: the sum over rows of
    weight * a / (1 - a) * |v_i - o_r| in the 1-norm (kind "l1", EDIE eq. 7) or the 2-norm ("l2", CAOTE eq. 6), or
    EDIE's weight * a / (1 + alpha - a) * (|v_i|_1 + |o_r|_1) ("edie", eq. 9-11); then reduced over the heads of a group
    as in `score`. Denominators are at least 1e-6. Rows, slots and lse are those of `score`, o [B,R,H,D] is the rows'
    part of `attend`'s out: `out[:, -R:]`.

    v_slots [N,D]  v [B,Hkv,S,D] -> as `score`
    """
    which, heads = _one_of("error: kind", kind, ERROR), _one_of("error: group", group, GROUP)
    if not alpha >= 0:
        raise ValueError(f"kvevict.error: alpha is {alpha}, expected a number >= 0")
    lse, sinks, weight = (_NONE if x is None else x for x in (lse, sinks, weight))
    args: tuple = (q, row_first, k_slots, v_slots, offset, len, k, v, first, stop, o, lse, sinks, weight, scale)
    args += (softcap, causal, which, alpha, heads, columns)
    return _call(_error, args)


def kl(
    q: Tensor,
    k: Tensor,
    target: Tensor,
    row_first: Tensor | None = None,
    k_slots: Tensor | None = None,
    offset: Tensor | None = None,
    len: Tensor | None = None,
    first: Tensor | None = None,
    stop: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    causal: bool = True,
    columns: int | None = None,
) -> Tensor:
    """How far what the rows of q pay to the first N alive slots is from a target (LookaheadKV eq. 5): the mean over
    batch and heads of KL(target / its sum || p / its sum), p being the mean over rows row_first[b] <= r < R of their
    attention, whose softmax spans all that they see. A p below 1e-30 counts as that. Differentiable in q and k, the
    new keys; the stored ones are constants.

    q [B,H,R,D]  k [B,Hkv,S,D]  target [B,H,N] >= 0; rows, slots and causal are those of `score` (None: all rows, no
    stored slots, all of k); scale None: D ** -0.5; columns >= the largest number of alive slots, None: that number
    -> a float32 scalar; no attention matrix exists at any time, what is kept for the backward is [B,H,columns].
    """
    B, Hkv, S, D = k.shape
    counts: dict = dict(dtype=torch.int32, device=q.device)
    if columns is None:
        columns = S + (0 if len is None or not len.numel() else int(len.max()))
    row_first = torch.zeros(B, **counts) if row_first is None else row_first
    k_slots = k.new_empty(0, D) if k_slots is None else k_slots
    offset = torch.zeros(B, Hkv, dtype=torch.int64, device=q.device) if offset is None else offset
    len = torch.zeros(B, Hkv, **counts) if len is None else len
    first = torch.zeros(B, **counts) if first is None else first
    stop = torch.full((B,), S, **counts) if stop is None else stop
    args = (q, k, target, row_first, k_slots, offset, len, first, stop, _NONE if sinks is None else sinks)
    return _call(_kl, (*args, D**-0.5 if scale is None else scale, softcap, causal, columns))[0].mean()


def refine(
    v_slots: Tensor,
    offset: Tensor,
    len: Tensor,
    v: Tensor,
    first: Tensor,
    stop: Tensor,
    score: Tensor,
    *,
    fast: bool = False,
    squared: bool = False,
) -> Tensor:
    """CAOTE of a pooled score >= 0 (eq. 6; `squared` is eq. 7): hn / (1 - hn) * |v_i - m|_2 with hn = score / its sum
    over the head's alive slots (1/n if that is 0) and m = sum hn v, or the plain mean of v if `fast` (FastCAOTE, eq.
    8). A slot with hn > 1 - 1e-6 gets the largest float32. A NaN makes its own head NaN and no other.

    v_slots [N,D]  offset len [B,Hkv]  v [B,Hkv,S,D]  first stop [B]  score [B,Hkv,C], not read past the alive slots
    -> [B,Hkv,C], 0 past a head's own.
    """
    args = (v_slots, offset, len, v, first, stop, score, fast, squared)
    return _call(_refine, args)


def norm(
    x_slots: Tensor, offset: Tensor, len: Tensor, x: Tensor, first: Tensor, stop: Tensor, *, p: int, columns: int
) -> Tensor:
    """|x_i|_p of every alive slot, x being the keys or the values; p is 1 or 2.

    x_slots [N,D]  offset len [B,Hkv]  x [B,Hkv,S,D]  first stop [B] -> [B,Hkv,columns], 0 past a head's own.
    """
    if p not in (1, 2):
        raise ValueError(f"kvevict.norm: p is {p!r}, expected 1 or 2")
    args = (x_slots, offset, len, x, first, stop, p, columns)
    return _call(_norm, args)


def select(score: Tensor, n: Tensor, keep: Tensor, protect_first: Tensor, protect_last: Tensor, columns: int) -> Tensor:
    """The keep[b,h] best of n[b,h] slots: the first protect_first[b] and last protect_last[b], then by
    (score descending, slot ascending); NaN ranks below every number.

    score [B,Hkv,C]  n keep [B,Hkv]  protect_first protect_last [B]
    -> int32 [B,Hkv,columns], ascending slot indices; -1 from column keep[b,h] on.
    """
    args = (score, n, keep, protect_first, protect_last, columns)
    return _call(_select, args)


def compact(
    k_src: Tensor,
    v_src: Tensor,
    pos_src: Tensor,
    src_offset: Tensor,
    src_len: Tensor,
    k: Tensor,
    v: Tensor,
    pos: Tensor,
    first: Tensor,
    index: Tensor | None,
    keep: Tensor,
    k_dst: Tensor,
    v_dst: Tensor,
    pos_dst: Tensor,
    dst_offset: Tensor,
) -> None:
    """Move slots index[b,h,:keep[b,h]] of [src | new] to dst_offset[b,h] of dst, in order. dst may be src with the
    same offsets. index None: slots 0 .. keep[b,h] - 1.

    k_src v_src [N,D]  pos_src [N]  src_offset src_len [B,Hkv]  k v [B,Hkv,S,D]  pos [B,S]  first [B]
    index [B,Hkv,K]  keep [B,Hkv]  k_dst v_dst [M,D]  pos_dst [M]  dst_offset [B,Hkv]
    """
    src = (k_src, v_src, pos_src, src_offset, src_len)
    args = (*src, k, v, pos, first, _NO_INDEX if index is None else index, keep, k_dst, v_dst, pos_dst, dst_offset)
    _call(_compact, args)
    _written(k_dst, v_dst, pos_dst)


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pos: Tensor,
    k_slots: Tensor,
    v_slots: Tensor,
    pos_slots: Tensor,
    offset: Tensor,
    len: Tensor,
    sinks: Tensor | None = None,
    *,
    scale: float,
    softcap: float = 0.0,
    columns: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """One decode step: write the new row behind each head's slots, then attend over len + 1 of them. The caller has
    made room, and adds 1 to len afterwards.

    q [B,H,1,D]  k v [B,Hkv,1,D]  pos [B,1]  k_slots v_slots [N,D]  pos_slots [N]  offset len [B,Hkv]
    sinks [H] or None
    -> out [B,1,H,D], lse [B,H,1], probs [B,Hkv,columns]: the row's attention averaged over the group, 0 past the new
    slot.
    """
    sinks = _NONE if sinks is None else sinks
    args = (q, k, v, pos, k_slots, v_slots, pos_slots, offset, len, sinks, scale, softcap, columns)
    results = _call(_decode, args)
    _written(k_slots, v_slots, pos_slots)
    return results


def cpu_isa() -> str:
    """Instruction set that the CPU kernels run with: "avx512bf16" (multiplies bf16 as it is), "avx512", "avx2" or
    "scalar", on ARM "neonbf16" or "neon". KVEVICT_CPU_ISA caps it, and any other name is an error here and in every
    op; "avx512bf16" is also taken where it is the slower if named."""
    return _C.cpu_isa()


def build_info() -> dict:
    """What the compiled part was built with: {"cuda": bool, "cuda_archs": "80,90", "torch_target": "2.10"}."""
    return _C.build_info()


DEVICES = ("cpu", "cuda") if build_info()["cuda"] else ("cpu",)  # types of those that ops run on


# Output shapes, for torch.compile and fake tensors. They run for real tensors too as soon as one is on meta.


def _one_device(*args):
    devices = {a.device for a in args if isinstance(a, Tensor) and a.numel()}
    torch._check(len(devices) < 2, lambda: f"tensors are on different devices: {sorted(map(str, devices))}")


@torch.library.register_fake("kvevict::attend")
def _(q, *rest):
    _one_device(q, *rest)
    B, H, T, D = q.shape
    return q.new_empty(B, T, H, D), q.new_empty(B, H, T, dtype=torch.float32)


@torch.library.register_fake("kvevict::score")
def _(q, row_first, k_slots, offset, len, k, *rest):
    _one_device(q, row_first, k_slots, offset, len, k, *rest)
    return _per_slot(q, k, *rest[-2:])


def _per_slot(q, k, group, columns):
    return q.new_empty(k.shape[0], q.shape[1] if group == GROUP["none"] else k.shape[1], columns, dtype=torch.float32)


@torch.library.register_fake("kvevict::peak")
def _(q, *rest):
    _one_device(q, *rest)
    return q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.register_fake("kvevict::error")
def _(q, row_first, k_slots, v_slots, offset, len, k, *rest):
    _one_device(q, row_first, k_slots, v_slots, offset, len, k, *rest)
    return _per_slot(q, k, *rest[-2:])


@torch.library.register_fake("kvevict::kl")
def _(q, k, target, *rest):
    _one_device(q, k, target, *rest)
    fp32 = dict(dtype=torch.float32)
    B, H, R = q.shape[:3]
    return q.new_empty(B, H, **fp32), q.new_empty(B, H, R, **fp32), q.new_empty(B, H, rest[-1], **fp32)


@torch.library.register_fake("kvevict::kl_grad")
def _(q, k, *rest):
    _one_device(q, k, *rest)
    return q.new_empty(q.shape, dtype=torch.float32), k.new_empty(k.shape, dtype=torch.float32)


def _kl_context(ctx, inputs, output):
    *tensors, _, scale, softcap, causal, _ = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.options = scale, softcap, causal


def _kl_backward(ctx, grad, *rest):
    *tensors, lse, paid = ctx.saved_tensors
    dq, dk = _call(_kl_grad, (*tensors, lse, paid, grad.contiguous(), *ctx.options))
    return dq.to(tensors[0].dtype), dk.to(tensors[1].dtype), *(None,) * 12


torch.library.register_autograd("kvevict::kl", _kl_backward, setup_context=_kl_context)


@torch.library.register_fake("kvevict::refine")
def _(v_slots, offset, len, v, first, stop, score, fast, squared):
    _one_device(v_slots, offset, len, v, first, stop, score)
    return torch.empty_like(score)


@torch.library.register_fake("kvevict::norm")
def _(x_slots, offset, len, x, first, stop, p, columns):
    _one_device(x_slots, offset, len, x, first, stop)
    return x.new_empty(x.shape[0], x.shape[1], columns, dtype=torch.float32)


@torch.library.register_fake("kvevict::select")
def _(score, n, keep, protect_first, protect_last, columns):
    _one_device(score, n, keep, protect_first, protect_last)
    return score.new_empty(score.shape[0], score.shape[1], columns, dtype=torch.int32)


@torch.library.register_fake("kvevict::compact")
def _(*args):
    _one_device(*args)


@torch.library.register_fake("kvevict::decode")
def _(q, k, *rest):
    _one_device(q, k, *rest)
    B, H, T, D = q.shape
    probs = q.new_empty(B, k.shape[1], rest[-1], dtype=torch.float32)
    return q.new_empty(B, T, H, D), q.new_empty(B, H, T, dtype=torch.float32), probs
