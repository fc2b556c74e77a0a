"""The representation of stored slots (methods.md section 11): keys and values in the model's dtype, or packed with 8 or
4 bits a number (csrc/kvevict.h)."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

MOST = 1.0  # expected error of a logit above which keys take more bits
FEW = 16  # number of a head's keys below which their centre counts as 0: later keys may lie far from it
POSITION = 4  # bytes of a slot's position
ROWS = 128  # number of a chunk's last queries, and least number of its keys, that choose the centre and the kind


def hadamard(x: Tensor) -> Tensor:
    """Multiply rows x [n, d] by the orthonormal Hadamard matrix of the largest power of two that divides d, by
    blocks."""
    size, shape = x.shape[1] & -x.shape[1], x.shape
    step = 1
    while step < size:
        a, b = x.reshape(-1, 2, step).unbind(1)
        x, step = torch.stack([a + b, a - b], 1), 2 * step
    return x.reshape(shape) * size**-0.5


def _numbers_int8(rows: Tensor, dim: int) -> Tensor:
    return rows[:, :dim].contiguous().view(torch.int8).float() * rows[:, dim:].contiguous().view(torch.float32)


def _numbers_int4(rows: Tensor, dim: int) -> Tensor:
    half = rows[:, : dim // 2]
    scale, least = rows[:, dim // 2 :].contiguous().view(torch.float16).float().split(1, 1)
    return hadamard(torch.cat([half & 15, half >> 4], 1).float() * scale + least)


def _steps_int4(rows: Tensor) -> Tensor:
    x = hadamard(rows.float().reshape(-1, rows.shape[-1])).reshape(rows.shape)
    return (x.amax(-1) - x.amin(-1)) / 15


class RowKind(NamedTuple):
    """How a row of numbers is stored. Its index in ROW_KINDS is its kind, as in `kv_kind` of csrc/kvevict.h."""

    name: str
    bits: int | None  # bits of a number; None: rows are in the model's dtype, and the other fields have no meaning
    word: int | None  # the kind's name in cache files
    wider: int  # the kind to use instead for rows beyond `most`, and for keys with too large an error
    most: float  # largest norm of a row: then no number of the rotated row, nor its scale, overflows
    numbers: Callable[[Tensor, int], Tensor]  # rows [n, *] and dim -> fp32 [n, dim], without the centre
    steps: Callable[[Tensor], Tensor]  # rows [.., d] -> fp32 [..] between two numbers that a packed row can hold


ROW_KINDS = (
    RowKind("model", None, None, 0, math.inf, None, None),  # type: ignore[arg-type]
    RowKind("int8", 8, 8, 0, math.inf, _numbers_int8, lambda rows: rows.abs().amax(-1).float() / 127),
    RowKind("int4", 4, 4, 1, torch.finfo(torch.float16).max, _numbers_int4, _steps_int4),
)
MODEL, INT8, INT4 = range(len(ROW_KINDS))
Kinds = tuple[int, int]  # the kinds of a layer's keys and of its values

# the kinds that a policy's `kv` names
KINDS: dict[str, Kinds] = {"model": (MODEL, MODEL), "int8": (INT8, INT8), "k8v4": (INT8, INT4), "int4": (INT4, INT4)}


def row_bytes(kind: int, dim: int, element: int) -> int:
    """Count the bytes of one row of `dim` numbers with its scale; element: bytes of a number in the model's dtype."""
    bits = ROW_KINDS[kind].bits
    return dim * element if bits is None else dim * bits // 8 + 4


def slot_bytes(kv: str, dim: int, element: int) -> int:
    """Count the bytes of a slot of one kv head, its key and value."""
    return sum(row_bytes(kind, dim, element) for kind in KINDS[kv])


def is_wider(kinds: Kinds, kv: str) -> bool:
    """Return whether keys of these kinds take more bits than those of a policy's `kv`."""
    asked, bits = ROW_KINDS[KINDS[kv][0]].bits, ROW_KINDS[kinds[0]].bits
    return asked is not None and (bits is None or bits > asked)


def buffer(kind: int, keys: Tensor) -> Tensor:
    """Make an empty buffer [0, *] for rows of keys [.., D]."""
    dim = keys.shape[-1]
    return keys.new_empty(0, dim) if kind == MODEL else keys.new_empty(0, row_bytes(kind, dim, 0), dtype=torch.uint8)


def numbers(rows: Tensor, kind: int, dim: int, centre: Tensor | None = None) -> Tensor:
    """Return rows [n, *] of a buffer as numbers [n, dim]: fp32 if the rows are packed. centre: fp32 [dim] of packed
    keys."""
    if kind == MODEL:
        return rows
    x = ROW_KINDS[kind].numbers(rows, dim)
    return x if centre is None else x + centre


def centre(keys: Tensor, weights: Tensor) -> Tensor:
    """Average keys [B, Hkv, S, D] by attention weights [B, Hkv, S], where a key of weight 0 does not count: fp32
    [B, Hkv, D], the c with the least sum of a_i |k_i - c|^2. It is 0 where the mean is not finite."""
    total = torch.einsum("bhs,bhsd->bhd", weights, keys.float().masked_fill(weights[..., None] == 0, 0))
    return (total / weights.sum(2)[..., None]).nan_to_num(0, 0, 0)


def expected_errors(
    query: Tensor, seen: Tensor, key: Tensor, held: Tensor, centre: Tensor, scale: float, kind: int
) -> Tensor:
    """Return the expected error of a logit of each query head with keys of a packed kind: fp32 [H]. Rounding moves a
    number by s / sqrt(12), s being the step of its row, and q . k by |q| s / sqrt(12). Medians of |q| and s are taken.

    query [B, H, T, D], key [B, Hkv, S, D], centre fp32 [B, Hkv, D]; seen, held: bool [B, heads or 1, *] the rows that
    count
    """

    def median(of: Callable[[Tensor], Tensor], x: Tensor, counts: Tensor) -> Tensor:  # per head, over counting rows
        apart = max(1, x.shape[2] // ROWS)
        numbers = of(x[:, :, ::apart]).masked_fill(~counts[:, :, ::apart], torch.nan)
        return numbers.transpose(0, 1).flatten(1).nanmedian(1).values

    steps, centre = ROW_KINDS[kind].steps, centre * (held.sum(2) >= FEW)[..., None]
    of_queries, of_keys = median(norms, query, seen), median(lambda x: steps(x - centre[:, :, None]), key, held)
    group = len(of_queries) // len(of_keys)
    return of_queries * of_keys.repeat_interleave(group) * (scale / 12**0.5)


def norms(rows: Tensor) -> Tensor:
    """Return the norms of rows [.., d]: fp32 [..]."""
    return torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float32)


def chosen(kv: str, error: Callable[[int], float], norm: Sequence[float]) -> Kinds:
    """Choose the kinds of a layer's keys and values, by a policy's `kv`. Rows too large for a kind take its wider one,
    and so do keys with too large an error. error: kind -> the mean of `expected_errors`; norm: of the key farthest from
    its centre, and of the largest value."""
    keys, values = KINDS[kv]
    while keys != MODEL and not (norm[0] <= ROW_KINDS[keys].most and error(keys) <= MOST):
        keys = ROW_KINDS[keys].wider
    while values != MODEL and not norm[1] <= ROW_KINDS[values].most:
        values = ROW_KINDS[values].wider
    return keys, values
