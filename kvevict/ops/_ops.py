"""The only interface to csrc: its ops as functions. `help` of an op shows the shapes and dtypes of its tensors, which
csrc/ops.def lists.

Dimensions are those of csrc/kvevict.h: B batch rows, H query heads, Hkv key/value heads, T query rows, R observing
rows, S new columns, D head dimension (a multiple of 8, at most 512, on a GPU 256); rows: rows of a flat buffer of
slots; C, K and N: columns of a score, of an index and of a target; K and N of `linear`: its inputs and outputs; heads:
H if group is "none", else Hkv.

A head's alive slots are [stored | new]: the stored ones are a `Held`, new columns count from first[b] on, after left
padding. A tensor whose shape shows no dtype is float32, float16 or bfloat16, as the op's first; q, k, v, o and x may
have any strides. All tensors of a call are on one device: the CPU or, in a build with CUDA, a GPU, whose current stream
runs the op. A wrong dtype raises TypeError, a wrong device or option ValueError, anything else (shapes, counts, slots
outside their buffer) RuntimeError, before any slot is written. On a GPU counts, offsets and indices are not checked,
since that would wait for the GPU. Only `kl` has a backward.
"""
# mypy: disable-error-code="empty-body"
# The functions without a body only declare a signature: `op` makes the real ones.

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from ._native import _C, DEVICES, build_info, cpu_isa, function, op  # noqa: F401  as _ops.build_info and the like

Tensor: TypeAlias = torch.Tensor


@dataclass
class Held:
    """The stored slots of a layer, in flat buffers that all its heads share: head h of batch row b owns rows
    offset[b, h] .. offset[b, h] + len[b, h] - 1, and no two heads own the same row of a buffer that an op writes. The
    docstring of an op lists the fields that it reads; the others may be None.

    k and v may each be packed as uint8, by a kv_kind of csrc/kvevict.h. `compact` and `decode` pack a row when they
    store it. Later moves copy its bytes, and every op unpacks the rows that it reads (the backward of `kl` on a CPU
    only).
    """

    k: Tensor = None  # type: ignore[assignment]  # [rows, D], or packed
    v: Tensor = None  # type: ignore[assignment]  # [rows, D], or packed
    pos: Tensor = None  # type: ignore[assignment]  # int32 [rows], the position that each key is rotated for
    offset: Tensor = None  # type: ignore[assignment]  # int64 [B, Hkv]
    len: Tensor = None  # type: ignore[assignment]  # int32 [B, Hkv]
    centre: Tensor | None = None  # float32 [B, Hkv, D], subtracted from keys before they are packed; None: 0
    k_kind: int = 0  # kv_kind of the rows of k; 0: not packed, in the call's dtype
    v_kind: int = 0

    def of(self, name: str) -> "Held":
        """These slots with their keys ("k") or values ("v") as `k`, for ops that read one array."""
        centre, kind = (self.centre, self.k_kind) if name == "k" else (None, self.v_kind)
        return Held(getattr(self, name), offset=self.offset, len=self.len, centre=centre, k_kind=kind)

    def within(self, begin: Tensor | int, length: Tensor) -> "Held":
        """The slots begin .. begin + length - 1 [B, Hkv] of each head, to be read only."""
        return replace(self, offset=self.offset + begin, len=length)


def softcapped(logits: Tensor, softcap: float) -> Tensor:
    """Softcap logits q . k * scale, as the ops do. softcap 0: none."""
    return softcap * torch.tanh(logits / softcap) if softcap else logits


def upload(numbers: object, device: torch.device | str, dtype: torch.dtype = torch.int64) -> Tensor:
    """Copy numbers of the host to a device, without waiting for it. (Reading a number from a GPU tensor waits for all
    of the GPU's queued work, so the counts that decide launches are kept on the host, too, as NumPy arrays.)"""
    return torch.tensor(numbers, dtype=dtype, device="cpu").to(device, non_blocking=True)


@op
def attend(
    q: Tensor, held: Held, k: Tensor, v: Tensor, first: Tensor, sinks: Tensor | None = None, stop: Tensor | None = None,
    *, scale: float, softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention over [stored | new]: row t sees every stored slot and new columns first[b] <= j <= t + S - T. With
    `stop` rows are not causal: each sees new columns first[b] <= j < stop[b]. lse is the natural log of the row's sum
    of exponentials, the sink's included; a row that sees nothing gets 0 and -inf.
    """


@op
def score(
    q: Tensor, row_first: Tensor, held: Held, k: Tensor, first: Tensor, stop: Tensor, lse: Tensor | None = None,
    sinks: Tensor | None = None, weight: Tensor | None = None, *, scale: float, softcap: float = 0.0,
    causal: bool = False, term: str = "a", reduce: str, group: str = "mean", columns: int,
) -> Tensor:  # fmt: skip
    """Attention weights a of the rows row_first[b] <= r < R of q on every alive slot (term "a"), their "square", or
    -a ln a ("entropy"), times the row's `weight`: reduced ("sum", "mean" or "max") over rows, then over the heads of a
    group ("mean", "sum", "max" or "none"). causal: the rows are those of the last R alive slots. lse: from `attend` for
    the same rows, or None to take it over the columns seen here (sinks count only then). reduce="max" has no weight and
    no entropy. columns C >= the largest number of alive slots; the result is 0 past a head's slots.
    """


@op
def peak(
    q: Tensor, row_first: Tensor, held: Held, k: Tensor, first: Tensor, stop: Tensor, lo: Tensor, hi: Tensor,
    lse: Tensor | None = None, sinks: Tensor | None = None, *, scale: float, softcap: float = 0.0, causal: bool = False,
) -> Tensor:  # fmt: skip
    """The largest attention weight of each row of q on one of the slots lo[b,h] <= i < hi[b,h], 0 <= lo <= hi <= the
    head's alive slots (EDIE eq. 10); 0 where there is none that it sees, and for rows before row_first[b]. Rows, slots
    and lse are those of `score`.
    """


@op
def error(
    q: Tensor, row_first: Tensor, held: Held, k: Tensor, v: Tensor, first: Tensor, stop: Tensor, o: Tensor,
    lse: Tensor | None = None, sinks: Tensor | None = None, weight: Tensor | None = None, *, scale: float,
    softcap: float = 0.0, causal: bool = False, kind: str, alpha: float = 0.0, group: str = "sum", columns: int,
) -> Tensor:  # fmt: skip
    """How far the rows' attention outputs move when one slot is removed, per alive slot: the sum over rows of
    weight * a / (1 - a) * |v_i - o_r| in the 1-norm (kind "l1", EDIE eq. 7) or the 2-norm ("l2", CAOTE eq. 6), or
    EDIE's weight * a / (1 + alpha - a) * (|v_i|_1 + |o_r|_1) ("edie", eq. 9-11, alpha >= 0); then reduced over the
    heads of a group as in `score`. Denominators are at least 1e-6. Rows, slots, lse and columns are those of `score`, o
    is the rows' part of `attend`'s out: `out[:, -R:]`.
    """


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
    """The divergence of attention weights on the first N alive slots from a target (LookaheadKV eq. 5): the mean over
    batch rows and heads of KL(target / its sum || p / its sum). p is the mean of the attention weights of the rows
    row_first[b] <= r < R of q, whose softmax spans all columns that a row sees; a p below 1e-30 counts as 1e-30.
    Differentiable in q and k (the new keys); stored keys are constants.

    q [B,H,R,D]  k [B,Hkv,S,D]  target float32 [B,H,N] >= 0; rows, slots and causal are those of `score` (None: all
    rows, no stored slots, all of k); scale None: D ** -0.5; columns >= the largest number of alive slots, None: equal
    to it -> a float32 scalar. No attention matrix exists at any time; [B,H,columns] is kept for the backward.
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
    """CAOTE of a pooled score >= 0 (eq. 6; `squared` is eq. 7): hn / (1 - hn) * |v_i - m|_2 with hn = score / its sum
    over the head's alive slots (1/n if that is 0) and m = sum hn v, or the plain mean of v if `fast` (FastCAOTE, eq.
    8). A slot with hn > 1 - 1e-6 gets the largest float32. A NaN makes only its head NaN. The score is not read past
    the alive slots; the result is 0 there.
    """


@op
def norm(held: Held, x: Tensor, first: Tensor, stop: Tensor, *, p: int, columns: int) -> Tensor:
    """|x_i|_p of every alive slot, x being keys or values, stored ones in held.k; p is 1 or 2. 0 past a head's end."""


@op
def quadratic(
    held: Held, x: Tensor, first: Tensor, stop: Tensor, matrix: Tensor, linear: Tensor | None = None, *, columns: int
) -> Tensor:
    """x_i . (A x_i + b) of every alive slot and every query head, x being the keys or the values of its kv head, stored
    ones in held.k, A its `matrix` and b its `linear` (None: 0). With A = W^T W that is |W x_i|^2. 0 past a head's end.
    """


@op
def select(score: Tensor, n: Tensor, keep: Tensor, protect_first: Tensor, protect_last: Tensor, columns: int) -> Tensor:
    """The keep[b,h] best of n[b,h] slots: the first protect_first[b] and last protect_last[b], then by
    (score descending, slot ascending); NaN ranks below every number. Ascending slot indices; -1 from column keep[b,h]
    on. columns K >= the largest keep.
    """


@op
def compact(
    src: Held, k: Tensor, v: Tensor, pos: Tensor, first: Tensor, index: Tensor | None, keep: Tensor, dst: Held
) -> None:
    """Move slots index[b,h,:keep[b,h]] of [src | new] to dst.offset[b,h] of dst, in order. dst may be src with the
    same offsets. index None: slots 0 .. keep[b,h] - 1. Rows that are packed in dst alone are packed, in src alone
    unpacked; in both they must be of the same kind.
    """


@op
def decode(
    q: Tensor, k: Tensor, v: Tensor, pos: Tensor, held: Held, sinks: Tensor | None = None, prefix: Held | None = None,
    *, scale: float, softcap: float = 0.0, columns: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Decode one token: write its row after each head's slots, then attend to these len + 1 slots. The caller has made
    room, and adds 1 to len afterwards. `prefix` has slots in other buffers, read only, that come first: columns are
    [prefix | stored | new], packed alike around one centre. A packed new row is read as it was stored. probs: the row's
    attention weights averaged over the group, 0 past the new slot, in C = `columns` columns: more than the largest len,
    or 0 for none.
    """


@op
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias, as `torch.nn.functional.linear`, of few rows: summed in fp32 and rounded once. A row's result
    does not depend on the other rows. K is a multiple of 32. On a CPU only."""
