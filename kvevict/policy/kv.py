"""Representation of stored slots (methods.md section 11): in the model's dtype, or packed in rows of 8 and 4 bits a
number (csrc/kvevict.h)."""

from collections.abc import Callable

import torch
from torch import Tensor

# Bits of a key's and of a value's numbers; None: the model's dtype.
KINDS: dict[str, tuple[int | None, int | None]] = {
    "model": (None, None),
    "int8": (8, 8),
    "k8v4": (8, 4),
    "int4": (4, 4),
}
WIDER: dict[int, int | None] = {4: 8, 8: None}
MOST = 1.0  # expected error of a logit above which keys take more bits
FEW = 16  # keys of a head, or more, lie about as far from their centre as later ones; of fewer it counts as 0
ROWS = 128  # of a chunk's queries and keys, at least, that choose the centre and the bits


def row_bytes(bits: int | None, dim: int, element: int) -> int:
    """Count the bytes of one row of `dim` numbers with its scale; element: bytes of a number in the model's dtype."""
    return dim * element if bits is None else dim * bits // 8 + 4


def slot_bytes(kv: str, dim: int, element: int) -> int:
    """Count the bytes of a slot of one kv head, its key and value."""
    return sum(row_bytes(bits, dim, element) for bits in KINDS[kv])


def is_wider(bits: tuple[int | None, int | None], kind: str) -> bool:
    """Return True if keys of so many bits take more than the kind's."""
    asked = KINDS[kind][0]
    return asked is not None and (bits[0] is None or bits[0] > asked)


def bits_of(rows: Tensor, dim: int) -> int | None:
    """Return the bits of a number in a buffer [n, *] of rows of `dim` numbers."""
    if rows.dtype != torch.uint8:
        return None
    return 8 if rows.shape[1] == dim + 4 else 4


def buffer(bits: int | None, keys: Tensor) -> Tensor:
    """Make an empty buffer [0, *] for rows of keys [.., D]."""
    dim = keys.shape[-1]
    return keys.new_empty(0, dim) if bits is None else keys.new_empty(0, row_bytes(bits, dim, 0), dtype=torch.uint8)


def numbers(rows: Tensor, dim: int, centre: Tensor | None = None) -> Tensor:
    """Return rows [n, *] of a buffer as numbers [n, dim]: fp32 if the rows are packed. centre: fp32 [dim] of packed
    keys."""
    if rows.dtype != torch.uint8:
        return rows
    if bits_of(rows, dim) == 8:
        x = rows[:, :dim].contiguous().view(torch.int8).float() * rows[:, dim:].contiguous().view(torch.float32)
    else:
        half = rows[:, : dim // 2]
        scale, least = rows[:, dim // 2 :].contiguous().view(torch.float16).float().split(1, 1)
        x = hadamard(torch.cat([half & 15, half >> 4], 1).float() * scale + least)
    return x if centre is None else x + centre


def hadamard(x: Tensor) -> Tensor:
    """Multiply rows x [n, d] by the orthonormal Hadamard matrix of the largest power of two that divides d, by
    blocks."""
    size, shape = x.shape[1] & -x.shape[1], x.shape
    step = 1
    while step < size:
        a, b = x.reshape(-1, 2, step).unbind(1)
        x, step = torch.stack([a + b, a - b], 1), 2 * step
    return x.reshape(shape) * size**-0.5


def centre(keys: Tensor, weights: Tensor) -> Tensor:
    """Average keys [B, Hkv, S, D] with attention weights [B, Hkv, S] (0: the key does not count): fp32 [B, Hkv, D], the
    c that makes the sum of a_i |k_i - c|^2 least. 0 where the mean is not finite."""
    total = torch.einsum("bhs,bhsd->bhd", weights, keys.float().masked_fill(weights[..., None] == 0, 0))
    return (total / weights.sum(2)[..., None]).nan_to_num(0, 0, 0)


def steps(rows: Tensor, bits: int) -> Tensor:
    """Return the step between two numbers that a packed row can hold: fp32 [..] of rows [.., d]."""
    if bits == 8:
        return rows.abs().amax(-1).float() / 127
    x = hadamard(rows.float().reshape(-1, rows.shape[-1])).reshape(rows.shape)
    return (x.amax(-1) - x.amin(-1)) / 15


def expected_errors(
    query: Tensor, seen: Tensor, key: Tensor, held: Tensor, centre: Tensor, scale: float, bits: int
) -> Tensor:
    """Return the expected error of a logit of each query head with keys of so many bits: fp32 [H]. A number is rounded
    by s / sqrt(12), s the step of its row, and so q . k by |q| s / sqrt(12). The medians of |q| and of s count.

    query [B, H, T, D], key [B, Hkv, S, D], centre fp32 [B, Hkv, D]; seen, held: bool [B, heads or 1, *] the rows that
    count
    """

    def median(of: Callable[[Tensor], Tensor], x: Tensor, counts: Tensor) -> Tensor:  # of every head
        apart = max(1, x.shape[2] // ROWS)
        numbers = of(x[:, :, ::apart]).masked_fill(~counts[:, :, ::apart], torch.nan)
        return numbers.transpose(0, 1).flatten(1).nanmedian(1).values

    def norms(x: Tensor) -> Tensor:
        return torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32)

    centre = centre * (held.sum(2) >= FEW)[..., None]
    of_queries, of_keys = median(norms, query, seen), median(lambda x: steps(x - centre[:, :, None], bits), key, held)
    group = len(of_queries) // len(of_keys)
    return of_queries * of_keys.repeat_interleave(group) * (scale / 12**0.5)


def chosen(kv: str, error: Callable[[int], float]) -> tuple[int | None, int | None]:
    """Choose the bits of a layer's keys and values, of the kind `kv`. Keys take more bits as long as their error is too
    large; error: bits -> the mean of `expected_errors`."""
    keys, values = KINDS[kv]
    while keys is not None and not error(keys) <= MOST:
        keys = WIDER[keys]
    return keys, values
