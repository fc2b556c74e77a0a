"""The kernels of csrc (the "ops") as Python functions; nothing else calls csrc. `help` of an op shows the shapes and
dtypes of its tensors, which csrc/ops.def lists.

Dimensions are those of csrc/kvevict.h: B batch rows, H query heads, Hkv key/value heads, T query rows, R observing
rows, S new columns, D head dimension (a multiple of 8, at most 512, on a GPU at most 256); rows: rows of a flat buffer
of slots; C columns of a score, K columns of an index, N columns of a target; for `linear`, K inputs and N outputs;
heads: H if group is "none", else Hkv.

A head's alive slots are [stored | new]: first the stored slots, given as a `Held`, then the new columns of k and v from
first[b] on, as columns before first[b] are left padding. A tensor for which `help` shows no dtype is float32, float16
or bfloat16, like the op's first tensor. q, k, v, o and x may have any strides. All tensors of a call are on one device:
the CPU or, in a build with CUDA, a GPU, whose current stream runs the op.

A wrong dtype raises TypeError, a wrong device or option ValueError, any other error (shapes, counts, slots outside
their buffer) RuntimeError, before any slot is written. On a GPU counts, offsets and indices are not checked, since a
check would wait for the GPU. Only `kl` has a backward.
"""
# mypy: disable-error-code="empty-body"
# A function without a body declares the signature and the docstring of an op; `op` replaces it by the real function.

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from ._native import _C, DEVICES, build_info, cpu_isa, function, op  # noqa: F401  for users of `_ops`

Tensor: TypeAlias = torch.Tensor


@dataclass
class Held:
    """The stored slots of a layer, in flat buffers that all its heads share: head h of batch row b owns rows
    offset[b, h] .. offset[b, h] + len[b, h] - 1, and no two heads own the same row of a buffer that an op writes. The
    docstring of an op lists the fields that it reads; the other fields may be None.

    k and v may each be packed as uint8, in a format (kv_kind) of csrc/kvevict.h. `compact` and `decode` pack a row when
    they store it. When the row is moved later, its bytes are copied, and every op unpacks the rows that it reads (the
    backward of `kl` on a CPU only).
    """

    k: Tensor = None  # type: ignore[assignment]  # keys [rows, D], or packed uint8
    v: Tensor = None  # type: ignore[assignment]  # values [rows, D], or packed uint8
    pos: Tensor = None  # type: ignore[assignment]  # int32 [rows] position by which each key is rotated
    offset: Tensor = None  # type: ignore[assignment]  # int64 [B, Hkv] first row of each head
    len: Tensor = None  # type: ignore[assignment]  # int32 [B, Hkv] number of stored slots of each head
    centre: Tensor | None = None  # float32 [B, Hkv, D], subtracted from keys before they are packed; None: 0
    k_kind: int = 0  # kv_kind of the rows of k; 0: rows are not packed, but in the call's dtype
    v_kind: int = 0  # kv_kind of the rows of v

    def of(self, name: str) -> "Held":
        """Return a copy whose field `k` has the keys (name="k") or the values ("v"), for ops that read one array."""
        centre, kind = (self.centre, self.k_kind) if name == "k" else (None, self.v_kind)
        return Held(getattr(self, name), offset=self.offset, len=self.len, centre=centre, k_kind=kind)

    def within(self, begin: Tensor | int, length: Tensor) -> "Held":
        """Return the slots begin .. begin + length - 1 of each head, begin and length [B, Hkv], for reading only."""
        return replace(self, offset=self.offset + begin, len=length)


def softcapped(logits: Tensor, softcap: float) -> Tensor:
    """Bound logits q . k * scale to -softcap .. softcap, as the ops do; softcap 0 leaves them unchanged."""
    return softcap * torch.tanh(logits / softcap) if softcap else logits


def upload(numbers: object, device: torch.device | str, dtype: torch.dtype = torch.int64) -> Tensor:
    """Copy numbers from the host to a device, without waiting for the device. (To read a number from a GPU tensor, the
    host waits for all of the GPU's queued work. Counts that decide launches are therefore kept on the host, too, as
    NumPy arrays.)"""
    return torch.tensor(numbers, dtype=dtype, device="cpu").to(device, non_blocking=True)


@op
def attend(
    q: Tensor, held: Held, k: Tensor, v: Tensor, first: Tensor, sinks: Tensor | None = None, stop: Tensor | None = None,
    *, scale: float, softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention over [stored | new] slots, as (out, lse). Row t of q sees every stored slot and new columns
    first[b] <= j <= t + S - T. With `stop` rows are not causal: each sees new columns first[b] <= j < stop[b]. lse is
    the natural logarithm of the row's sum of exponentials, its attention sink included; without a sink, a row that sees
    nothing gets out 0 and lse -inf.
    """


@op
def score(
    q: Tensor, row_first: Tensor, held: Held, k: Tensor, first: Tensor, stop: Tensor, lse: Tensor | None = None,
    sinks: Tensor | None = None, weight: Tensor | None = None, *, scale: float, softcap: float = 0.0,
    causal: bool = False, term: str = "a", reduce: str, group: str = "mean", columns: int,
) -> Tensor:  # fmt: skip
    """The score of every alive slot from the attention weights a of the rows row_first[b] <= r < R of q. The term a
    ("a"), its "square" or -a ln a ("entropy"), times the row's `weight`, is reduced over rows (`reduce`: "sum", "mean"
    or "max"), then over the query heads of a group (`group`: "mean", "sum", "max" or "none").

    causal: the rows are the queries of the last R alive slots. lse: the rows' lse from `attend`; None: it is computed
    over the columns that a row sees here, and only then `sinks` are read. reduce="max" allows no weight and no entropy.
    columns: C, at least the largest number of alive slots; the result is 0 past a head's last slot.
    """


@op
def peak(
    q: Tensor, row_first: Tensor, held: Held, k: Tensor, first: Tensor, stop: Tensor, lo: Tensor, hi: Tensor,
    lse: Tensor | None = None, sinks: Tensor | None = None, *, scale: float, softcap: float = 0.0, causal: bool = False,
) -> Tensor:  # fmt: skip
    """The largest attention weight of each row of q on a slot lo[b,h] <= i < hi[b,h], with 0 <= lo <= hi <= the head's
    number of alive slots (EDIE eq. 10). The result is 0 for a row that sees no such slot, and for rows before
    row_first[b]. row_first, held, first, stop, causal and lse have the same meaning as in `score`.
    """


@op
def error(
    q: Tensor, row_first: Tensor, held: Held, k: Tensor, v: Tensor, first: Tensor, stop: Tensor, o: Tensor,
    lse: Tensor | None = None, sinks: Tensor | None = None, weight: Tensor | None = None, *, scale: float,
    softcap: float = 0.0, causal: bool = False, kind: str, alpha: float = 0.0, group: str = "sum", columns: int,
) -> Tensor:  # fmt: skip
    """Estimate for every alive slot i how far the rows' attention outputs o_r move when the slot is removed. Let a be
    row r's attention weight on slot i, v_i the slot's value, and w the row's factor in `weight`. The estimate is the
    sum over rows r of

        w * a / (1 - a) * |v_i - o_r|                       kind "l1" (1-norm, EDIE eq. 7) or "l2" (2-norm, CAOTE eq. 6)
        w * a / (1 + alpha - a) * (|v_i|_1 + |o_r|_1)       kind "edie" (EDIE eq. 9-11, alpha >= 0)

    It is then reduced over the query heads of a group, as in `score`.

    Denominators are at least 1e-6. row_first, held, first, stop, causal, lse and columns have the same meaning as in
    `score`. o has the rows' attention outputs, as `attend` returns them: `out[:, -R:]`.
    """


@op
def attend_score(
    q: Tensor, held: Held, k: Tensor, v: Tensor, first: Tensor, row_first: Tensor, stop: Tensor,
    sinks: Tensor | None = None, weight: Tensor | None = None, *, scale: float, softcap: float = 0.0, observers: int,
    causal: bool = True, term: str = "a", reduce: str, group: str = "mean", span: int = -1, columns: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`attend` whose last rows observe, as (out, lse, score): out and lse are those of `attend` with causal rows, and
    score is that of `score` for the last `observers` rows of q, R of them, with their lse; all with the same bits. On a
    CPU the logits are made once, unless tile registers multiply bf16.

    row_first, stop, causal, weight, term, reduce, group and columns are those of `score`. span: the observers' softmax
    spans the head's first `span` stored slots and the new columns that a row sees in `attend` (KVzip, section 3.2),
    instead of all that it sees there; -1: all.
    """


@op
def attend_error(
    q: Tensor, held: Held, k: Tensor, v: Tensor, first: Tensor, row_first: Tensor, stop: Tensor,
    sinks: Tensor | None = None, weight: Tensor | None = None, *, scale: float, softcap: float = 0.0, observers: int,
    causal: bool = True, kind: str, alpha: float = 0.0, group: str = "sum", columns: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`attend` whose last rows observe, as (out, lse, error): `attend_score` with `error` in the place of `score`, for
    the outputs that `attend` computes."""


@op
def attend_peak(
    q: Tensor, held: Held, k: Tensor, v: Tensor, first: Tensor, row_first: Tensor, stop: Tensor, lo: Tensor, hi: Tensor,
    sinks: Tensor | None = None, *, scale: float, softcap: float = 0.0, observers: int, causal: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`attend` whose last rows observe, as (out, lse, peak): `attend_score` with `peak` in the place of `score`."""


_kl = function("kl", "q, k, row_first, held, first, stop, scale, softcap, causal, sinks, target, columns")
_kl_grad = function("kl_grad")


def _kl_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, row_first, kind, *held, scale, softcap, causal, _, target, _ = inputs
    _, lse, mean_attn = output
    ctx.mark_non_differentiable(lse, mean_attn)
    ctx.save_for_backward(q, k, row_first, *held, lse, target, mean_attn)
    ctx.kind, ctx.options = kind, (scale, softcap, causal)


def _kl_backward(ctx: Any, grad: torch.Tensor, *rest: Any) -> tuple:
    q, k, row_first, *held, lse, target, mean_attn = ctx.saved_tensors
    dq, dk = _kl_grad(q, k, row_first, ctx.kind, *held, *ctx.options, lse, target, mean_attn, grad.contiguous())
    return dq.to(q.dtype), dk.to(k.dtype), *[None] * (len(ctx.needs_input_grad) - 2)


torch.library.register_autograd("kvevict::kl", _kl_backward, setup_context=_kl_context)


def kl(
    q: Tensor, k: Tensor, target: Tensor, row_first: Tensor | None = None, held: Held | None = None,
    first: Tensor | None = None, stop: Tensor | None = None, sinks: Tensor | None = None, *, scale: float | None = None,
    softcap: float = 0.0, causal: bool = True, columns: int | None = None,
) -> Tensor:  # fmt: skip
    """The Kullback-Leibler divergence of attention weights on the first N alive slots from a target (LookaheadKV
    eq. 5), a float32 scalar: the mean over batch rows and heads of KL(target / sum of target || p / sum of p). p is the
    mean attention weight of the rows row_first[b] <= r < R of q, whose softmax spans all columns that a row sees; a p
    below 1e-30 counts as 1e-30. Differentiable in q and k (the new keys); stored keys are constants.

    q [B,H,R,D]  k [B,Hkv,S,D]  target float32 [B,H,N] >= 0. row_first, held, first, stop and causal have the same
    meaning as in `score`; by default all rows observe, no slots are stored, and all columns of k are seen. scale None:
    D ** -0.5. columns: at least the largest number of alive slots; None: equal to it. No attention matrix is
    materialised; a tensor [B,H,columns] is kept for the backward.
    """
    if k.ndim != 4:
        raise RuntimeError(f"kvevict.kl: k has shape {list(k.shape)}, expected [B, Hkv, S, D]")
    B, Hkv, S, D = k.shape
    counts: dict = dict(dtype=torch.int32, device=q.device)
    if held is None:
        held = Held(k.new_empty(0, D), offset=torch.zeros(B, Hkv, dtype=torch.int64, device=q.device))
        held.len = torch.zeros(B, Hkv, **counts)
    if not isinstance(held, Held):
        raise TypeError(f"kvevict.kl: held is {held!r}, expected a kvevict.ops._ops.Held")
    if columns is None:
        columns = S + (int(held.len.max()) if held.len.numel() else 0)
    row_first = torch.zeros(B, **counts) if row_first is None else row_first
    first = torch.zeros(B, **counts) if first is None else first
    stop = torch.full((B,), S, **counts) if stop is None else stop
    scale = D**-0.5 if scale is None else scale
    return _kl(q, k, row_first, held, first, stop, scale, softcap, causal, sinks, target, columns)[0].mean()


@op
def refine(
    held: Held, v: Tensor, first: Tensor, stop: Tensor, score: Tensor, *, fast: bool = False, squared: bool = False
) -> Tensor:
    """CAOTE, an attention-output error, of every slot from its pooled score >= 0 (CAOTE eq. 6; with `squared` eq. 7):
    hn / (1 - hn) * |v_i - m|_2. hn is the slot's share of the head's scores, score / sum of scores over alive slots
    (1/n of n slots if this sum is 0); m is the mean value weighted by hn, or with `fast` the plain mean value
    (FastCAOTE, eq. 8). A slot with hn > 1 - 1e-6 gets the largest float32. A NaN in a head makes the results of this
    head NaN, but no others. The score is not read past a head's alive slots, where the result is 0.
    """


@op
def norm(held: Held, x: Tensor, first: Tensor, stop: Tensor, *, p: int, columns: int) -> Tensor:
    """The norm |x_i|_p of every alive slot's key or value x_i, p being 1 or 2. Stored x_i are read from held.k. The
    result is 0 past a head's last slot."""


@op
def quadratic(
    held: Held, x: Tensor, first: Tensor, stop: Tensor, matrix: Tensor, linear: Tensor | None = None, *, columns: int
) -> Tensor:
    """The quadratic form x_i . (A x_i + b) for every query head and every alive slot's key or value x_i in the query
    head's kv head. Stored x_i are read from held.k; A is the query head's `matrix` and b its `linear` (None: 0). With
    A = W^T W and b = 0 the result is |W x_i|^2. It is 0 past a head's last slot.
    """


@op
def probe(
    q: Tensor, past: Tensor, decay: Tensor, cos: Tensor | None = None, sin: Tensor | None = None,
    partner: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The exponential average of a probe's queries over a prompt's chunks (TAKE eq. 9): decay[b] Rot(past) +
    (1 - decay[b]) q. q are this chunk's R probe rows and past the average over the chunks before.

    Rot rotates the average to the positions of q: Rot(x)[d] = x[d] cos[b,d] + x[partner[d]] sin[b,d]. Without cos, sin
    and partner Rot(x) is x, as eq. 9 is printed. Each product and sum is rounded to float32, as torch rounds them."""


@op
def select(score: Tensor, n: Tensor, keep: Tensor, protect_first: Tensor, protect_last: Tensor, columns: int) -> Tensor:
    """The indices of the keep[b,h] best of n[b,h] slots of each head, ascending, and -1 from column keep[b,h] on. The
    first protect_first[b] and the last protect_last[b] slots come before all others, which are ranked by score,
    descending, and by slot index where scores are equal; NaN ranks below every number. columns: K, at least the largest
    keep.
    """


@op
def compact(
    src: Held, k: Tensor, v: Tensor, pos: Tensor, first: Tensor, index: Tensor | None, keep: Tensor, dst: Held
) -> None:
    """Copy the slots index[b,h,:keep[b,h]] of [src | new], in this order, to the rows of dst from dst.offset[b,h] on;
    index None: the slots 0 .. keep[b,h] - 1. dst may be src with the same offsets. If only dst is packed, rows are
    packed; if only src is packed, they are unpacked; if both are, their kinds must be equal.
    """


@op
def decode(
    q: Tensor, k: Tensor, v: Tensor, pos: Tensor, held: Held, sinks: Tensor | None = None, prefix: Held | None = None,
    *, scale: float, softcap: float = 0.0, columns: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Decode one token, as (out, lse, probs): store its key and value after each head's slots, then attend to these
    len + 1 slots. `held` must have room for the new row; len is not changed by the op.

    prefix   slots in other buffers, which are only read and come first: columns are [prefix | stored | new]. They must
             be packed like the slots of held, around its centre
    columns  C, number of columns of probs, more than the largest len; 0: probs is not computed

    probs are the row's attention weights averaged over the query heads of a group, 0 past the new slot. A new row that
    is stored packed takes part with its packed numbers.
    """


@op
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias, as in `torch.nn.functional.linear`, for x with few rows, on a CPU only. Products are summed in
    fp32 and rounded once, and a row's result does not depend on other rows. K must be a multiple of 32."""
