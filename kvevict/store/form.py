"""Defines the format of a cache file, and checks that its tensors and its facts (JSON in the metadata) fit together."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..models import families
from ..policy.checks import count
from ..policy.kv import MODEL, ROW_KINDS, row_bytes
from ..policy.policy import Policy, from_json
from ..policy.run import Run
from .sealed import Pieces, whole

FORMAT = "kvevict-cache-5"
ANY = FORMAT.rstrip("0123456789")  # the beginning of `FORMAT` in every version of kvevict
FLAT = (
    "k",
    "v",
    "pos",
)  # tensors [slots, ..]: slots of batch row 0's kv head 0, then its head 1, ..., then of row 1
OPTIONAL = ("carry", "decode_queries")  # tensors that not every layer that evicts has
OF_ROWS = ("seen", "budget")  # tensors [B]: a number for each batch row
WORDS = [kind.word for kind in ROW_KINDS]  # how a file names each kind of stored rows
WRONG = LookupError, ValueError, TypeError, RuntimeError  # what may be raised for a file with impossible content


def expect(name: str, tensor: Tensor | Pieces, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Raise ValueError unless a tensor has this shape and dtype."""
    if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype:
        raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}, expected {dtype} {list(shape)}")


def expect_rows(name: str, tensor: Tensor | Pieces, rows: int, dim: int, dtype: Any, kind: int) -> None:
    """Raise ValueError unless a tensor has `rows` rows of `dim` numbers each: in type `dtype` for the kind MODEL, else
    packed into bytes as `ROW_KINDS[kind]` describes."""
    width, element = (dim, dtype) if kind == MODEL else (row_bytes(kind, dim, 0), torch.uint8)
    expect(name, tensor, (rows, width), element)


def of_layer(tensors: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return the tensors of layer `index`, by their names without the layer's number."""
    own = f"{index}."
    return {name.removeprefix(own): t for name, t in tensors.items() if name.startswith(own)}


def check(tensors: Mapping[str, Any], facts: list[dict[str, Any]], common: dict[str, Any]) -> None:
    """Raise one of `WRONG` if the content of a file contradicts itself. Files are checked before they are written, and
    when they are read.

    tensors  the file's tensors, by names "LAYER.NAME"
    facts    the facts of each layer
    common   the facts of the whole cache
    """
    columns, batches, end = count("columns", facts[0].get("columns"), 0), set(), 0
    if any(fact.get("columns") != columns for fact in facts):
        raise ValueError("its layers disagree on the number of tokens seen")
    for index, fact in enumerate(facts):
        if fact["kind"] == families.NOTHING:
            continue
        check_layer = _check_evicted if fact["kind"] == families.FULL_ATTENTION else _check_sliding
        try:
            batches.add(check_layer(of_layer(tensors, index), fact))
        except WRONG as error:
            raise ValueError(f"layer {index}: {error}") from None
        end = max(end, fact.get("end", 0))
    if len(batches) > 1:
        raise ValueError(f"its layers have batches of {sorted(batches)} rows")
    for start, stop in common["packed"]:
        count("packed columns", start, 0)
        if not start < count("packed columns", stop, 0) <= columns:
            raise ValueError(f"packed columns {start} to {stop} were not read")
    following, batch = common["next_position"], batches.pop()
    if following is not None:
        if len(following) != batch:
            raise ValueError(f"next_position has {len(following)} rows, the layers {batch}")
        for position in following:
            if count("next_position", position, 0) > end:
                raise ValueError(f"next_position is {position}, of positions below {end}")


def _check_sliding(tensors: dict, fact: dict) -> int:
    """Check the content of a layer with a sliding window, and return the number of batch rows."""
    keys, length = tensors["keys"], min(fact["columns"], count("window", fact["window"], 1) - 1)
    expect("keys", keys, (*keys.shape[:2], length, *keys.shape[3:]), keys.dtype)
    expect("values", tensors["values"], keys.shape, keys.dtype)
    return keys.shape[0]


def _check_evicted(tensors: dict, fact: dict) -> int:
    """Check the content of a layer that evicts, and return the number of batch rows."""
    length, arrays, kinds = tensors["len"], [tensors["k"], tensors["v"]], kinds_of(fact)
    batch, heads = length.shape if length.ndim == 2 else (0, 0)
    rows = int(length.sum())
    plain = next((each for each, kind in zip(arrays, kinds) if kind == MODEL), None)
    dtype, dim = (None, 0) if plain is None else (plain.dtype, plain.shape[-1])
    if kinds[0] != MODEL:
        dim = tensors["centre"].shape[-1]
        expect("centre", tensors["centre"], (batch, heads, dim), torch.float32)
    for name, each, of_rows in zip("kv", arrays, kinds, strict=True):
        expect_rows(name, each, rows, dim, dtype, of_rows)
    for name, shape, kind in (
        ("len", (batch, heads), torch.int32), ("pos", (rows,), torch.int32),
        ("seen", (batch,), torch.int32), ("budget", (batch,), torch.int32),
    ):  # fmt: skip
        expect(name, tensors[name], shape, kind)
    seen, columns = tensors["seen"], fact["columns"]
    if bool((length < 0).any() or (length > seen[:, None]).any() or (seen > columns).any()):
        raise ValueError("more slots than tokens, or more tokens than columns")
    end, pos = count("end", fact["end"], columns), whole(tensors["pos"])
    if bool(((pos < 0) | (pos >= end)).any()):
        raise ValueError(f"pos has positions that are not in 0 .. {end - 1}")
    if bool((steps_of(pos, length) < (0 if fact["ties"] is True else 1)).any()):
        raise ValueError("pos has positions of a head that do not ascend")
    if "carry" in tensors:
        expect("carry", tensors["carry"], (batch, heads, int(length.max())), torch.float32)
    if "prompt" in tensors:
        expect("prompt", tensors["prompt"], (batch, heads), torch.int32)
        if bool(((tensors["prompt"] < 0) | (tensors["prompt"] > length)).any()):
            raise ValueError("prompt counts more slots than there are")
    return batch


def steps_of(pos: Tensor, length: Tensor) -> Tensor:
    """Return the differences between the positions of neighbouring slots within each head, concatenated over heads.

    pos     [slots] positions, head after head
    length  [B, Hkv] number of slots of each head
    """
    ends = length.flatten().cumsum(0)
    within = torch.ones(max(0, len(pos) - 1), dtype=torch.bool, device=pos.device)
    within[ends[(ends > 0) & (ends < len(pos))] - 1] = False
    return pos.long().diff()[within]


def kinds_of(fact: dict) -> tuple:
    """Return (kind of a layer's stored keys, kind of its stored values), each an index in `ROW_KINDS`."""
    words = fact.get("bits", [None, None])
    if not isinstance(words, (list, tuple)) or len(words) != 2 or not all(each in WORDS for each in words):
        raise ValueError(f"slots of {words!r} bits, which this version of kvevict does not know")
    return tuple(WORDS.index(each) for each in words)


def policy_of(common: dict) -> tuple[Policy, Run]:
    """Return (policy, run) from the facts of a file's cache. In older files the run's fields are part of the policy's
    JSON."""
    policy, run = from_json(common["policy"])
    return policy, Run(**common["run"]) if "run" in common else run
