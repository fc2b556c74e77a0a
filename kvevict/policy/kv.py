"""Represents stored slots (methods.md section 11): keys and values in the model's dtype, or packed in 8 or 4 bits per
number (layout: csrc/kvevict.h)."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

MOST = 1.0  # largest expected error of a logit; if it is larger, keys take more bits
FEW = 16  # with fewer keys than this, a head's centre (mean key) counts as 0: later keys may lie far from their mean
POSITION = 4  # bytes of a slot's position
# number of last queries whose attention weights average a head's keys to its centre; a median samples as many rows or
# more
ROWS = 128


def hadamard(x: Tensor) -> Tensor:
    """Multiply each row of x [n, d], block by block, by the orthonormal Hadamard matrix whose size is the largest power
    of two that divides d."""
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
    """How a row (one key or one value) is stored. A kind's index in ROW_KINDS is its `kv_kind` in csrc/kvevict.h."""

    name: str
    bits: int | None  # bits per number; None: rows are in the model's dtype, and the last four fields are not used
    word: int | None  # what cache files call this kind
    wider: int  # index of the kind to use for rows with a norm above `most`, and for keys with too large an error
    most: float  # largest norm of a row; up to it, neither the rotated numbers nor their scale overflow
    numbers: Callable[[Tensor, int], Tensor]  # unpacks: (rows [n, row bytes], dim) -> fp32 [n, dim], centre not added
    steps: Callable[[Tensor], Tensor]  # rows [.., d] -> their quantization steps, fp32 [..]


ROW_KINDS = (
    RowKind("model", None, None, 0, math.inf, None, None),  # type: ignore[arg-type]
    RowKind("int8", 8, 8, 0, math.inf, _numbers_int8, lambda rows: rows.abs().amax(-1).float() / 127),
    RowKind("int4", 4, 4, 1, torch.finfo(torch.float16).max, _numbers_int4, _steps_int4),
)
MODEL, INT8, INT4 = range(len(ROW_KINDS))
Kinds = tuple[int, int]  # the kinds of a layer's keys and of its values

# value of the option `kv` -> kinds of keys and of values
KINDS: dict[str, Kinds] = {"model": (MODEL, MODEL), "int8": (INT8, INT8), "k8v4": (INT8, INT4), "int4": (INT4, INT4)}


def row_bytes(kind: int, dim: int, element: int) -> int:
    """Count the bytes of one row of `dim` numbers and its scale. element: bytes per number in the model's dtype."""
    bits = ROW_KINDS[kind].bits
    return dim * element if bits is None else dim * bits // 8 + 4


def slot_bytes(kv: str, dim: int, element: int) -> int:
    """Count the bytes of one slot: a key and a value of `dim` numbers each. kv: value of the option; element: bytes per
    number in the model's dtype."""
    return sum(row_bytes(kind, dim, element) for kind in KINDS[kv])


def is_wider(kinds: Kinds, kv: str) -> bool:
    """Return whether keys stored as `kinds` take more bits than the option `kv` asks for."""
    asked, bits = ROW_KINDS[KINDS[kv][0]].bits, ROW_KINDS[kinds[0]].bits
    return asked is not None and (bits is None or bits > asked)


def buffer(kind: int, keys: Tensor) -> Tensor:
    """Make an empty buffer [0, row size] for rows of this kind that hold D numbers each, on the device of keys
    [.., D]."""
    dim = keys.shape[-1]
    return keys.new_empty(0, dim) if kind == MODEL else keys.new_empty(0, row_bytes(kind, dim, 0), dtype=torch.uint8)


def numbers(rows: Tensor, kind: int, dim: int, centre: Tensor | None = None) -> Tensor:
    """Unpack rows [n, row size] of a buffer to numbers [n, dim], fp32 if the rows are packed. centre: fp32 [dim], added
    to packed keys."""
    if kind == MODEL:
        return rows
    x = ROW_KINDS[kind].numbers(rows, dim)
    return x if centre is None else x + centre


def centre(keys: Tensor, weights: Tensor) -> Tensor:
    """Average keys k [B, Hkv, S, D] with attention weights a [B, Hkv, S]: fp32 [B, Hkv, D], the c that minimises the
    sum of a_i |k_i - c|^2. A key of weight 0 does not count, even if it is not finite. A mean that is not finite
    becomes 0."""
    total = torch.einsum("bhs,bhsd->bhd", weights, keys.float().masked_fill(weights[..., None] == 0, 0))
    return (total / weights.sum(2)[..., None]).nan_to_num(0, 0, 0)


def expected_errors(
    query: Tensor, seen: Tensor, key: Tensor, held: Tensor, centre: Tensor, scale: float, kind: int
) -> Tensor:
    """Return the expected error of each query head's logits if keys are stored as the packed `kind`: fp32 [H].

    Rounding moves a number by s / sqrt(12) (root mean square), where s is the quantization step of its row, and so
    moves the logit q . k * scale by |q| s / sqrt(12) * scale. For |q| and s their medians over rows are taken.

    query [B, H, T, D], key [B, Hkv, S, D], centre fp32 [B, Hkv, D]; seen bool [B, H or 1, T]: the queries that count;
    held bool [B, Hkv or 1, S]: the keys that count
    """

    def median(of: Callable[[Tensor], Tensor], x: Tensor, counts: Tensor) -> Tensor:  # per head, of rows that count
        apart = max(1, x.shape[2] // ROWS)
        numbers = of(x[:, :, ::apart]).masked_fill(~counts[:, :, ::apart], torch.nan)
        return numbers.transpose(0, 1).flatten(1).nanmedian(1).values

    steps, centre = ROW_KINDS[kind].steps, centre * (held.sum(2) >= FEW)[..., None]
    of_queries, of_keys = median(norms, query, seen), median(lambda x: steps(x - centre[:, :, None]), key, held)
    group = len(of_queries) // len(of_keys)
    return of_queries * of_keys.repeat_interleave(group) * (scale / 12**0.5)


def norms(rows: Tensor) -> Tensor:
    """Return the 2-norms of rows [.., d]: fp32 [..]."""
    return torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float32)


def chosen(kv: str, error: Callable[[int], float], norm: Sequence[float]) -> Kinds:
    """Choose the kinds of a layer's keys and values, starting from the kinds of the option `kv`. Rows with a norm above
    a kind's `most` take its `wider` kind, and so do keys with an expected error above MOST.

    error: function from a kind to the mean of its `expected_errors`; norm: the largest norm of a key less its centre,
    and the largest norm of a value
    """
    keys, values = KINDS[kv]
    while keys != MODEL and not (norm[0] <= ROW_KINDS[keys].most and error(keys) <= MOST):
        keys = ROW_KINDS[keys].wider
    while values != MODEL and not norm[1] <= ROW_KINDS[values].most:
        values = ROW_KINDS[values].wider
    return keys, values
