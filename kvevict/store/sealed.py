"""Reads and writes safetensors files with a checksum, and pairs of a safetensors and a JSON file with one checksum.

The checksum is a CRC-32 of all bytes, computed with zeros in place of the checksum's own eight digits. It detects
damage, not forgery.
"""

import json
import math
import mmap
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .files import replacing
from .files import write as write_bytes

NAME, EMPTY = "checksum", "0" * 8  # the checksum's field, and the field's value while the checksum is computed
FIELD = re.compile(rb'"checksum": ?"([0-9a-f]{8})"')
TYPES = {  # dtype -> its name in safetensors files, where tensors of dtypes listed later come first, as in safetensors
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.int32: "I32", torch.float32: "F32", torch.float64: "F64", torch.int64: "I64",
}  # fmt: skip


@dataclass
class Pieces:
    """A tensor to be written to a file, whose parts lie in several places of the memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    each: Callable[[], Iterable[Tensor]]  # yields the parts, which concatenated along dimension 0 are the tensor


def whole(tensor: Tensor | Pieces) -> Tensor:
    """Return a tensor itself, or the concatenation of `Pieces`."""
    return torch.cat([*tensor.each()]) if isinstance(tensor, Pieces) else tensor


def seal(data: bytearray, before: int = 0) -> None:
    """Write the checksum of data into the field `checksum` in data. before: CRC-32 of another file, whose content the
    checksum covers, too; 0: there is none."""
    start, digits = _checksum(data, before)
    data[start : start + len(digits)] = digits


def is_whole(data: bytes | bytearray | mmap.mmap, before: int = 0) -> bool:
    """Return whether the field `checksum` in data has the right checksum. before: CRC-32 of another file, whose content
    the checksum covers, too; 0: there is none."""
    found = _checksum(data, before)
    return found is not None and data[found[0] : found[0] + len(EMPTY)] == found[1]


def _checksum(data: bytes | bytearray | mmap.mmap, before: int) -> tuple[int, bytes] | None:
    """Return (offset of the digits in the field `checksum`, the right digits); None if data has no such field."""
    field = FIELD.search(data)
    if field is None:
        return None
    start, stop = field.span(1)
    del field  # the match refers to data, and would keep a file mapped
    with memoryview(data) as whole, whole[:start] as head, whole[stop:] as tail:
        value = zlib.crc32(tail, zlib.crc32(EMPTY.encode(), zlib.crc32(head, before)))
    return start, f"{value:08x}".encode()


def write(
    path: str | os.PathLike, tensors: Mapping[str, Tensor | Pieces], metadata: dict[str, str], sync: bool = True
) -> None:
    """Write tensors and metadata to a safetensors file, completely or not at all, with permissions 0600. Raises OSError
    if the file cannot be written. sync: whether the data must be on the disk before the file gets its name."""
    names = sorted(tensors, key=lambda name: (-[*TYPES].index(tensors[name].dtype), name))
    head = _head({name: tensors[name] for name in names}, metadata | {NAME: EMPTY})
    field: Any = FIELD.search(head)
    with (
        replacing(path, sync=sync) as temporary,
        open(os.open(temporary, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file,
    ):
        file.write(head)
        checksum = zlib.crc32(head)
        for name in names:
            for part in _parts(tensors[name]):
                file.write(part)
                checksum = zlib.crc32(part, checksum)
        file.seek(field.start(1))
        file.write(f"{checksum:08x}".encode())


def _head(tensors: Mapping[str, Tensor | Pieces], metadata: dict[str, str]) -> bytes:
    """Make the header of a safetensors file, padded to a multiple of 8 bytes."""
    facts: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + math.prod(tensor.shape) * tensor.dtype.itemsize
        facts[name] = dict(dtype=TYPES[tensor.dtype], shape=[*tensor.shape], data_offsets=[start, end])
    data = json.dumps(facts, separators=(",", ":"), ensure_ascii=False).encode()
    data += b" " * (-len(data) % 8)
    return len(data).to_bytes(8, "little") + data


def _parts(tensor: Tensor | Pieces) -> Iterator[Any]:
    """Yield the bytes of a tensor, part by part."""
    for part in tensor.each() if isinstance(tensor, Pieces) else (tensor,):
        yield part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()


def texts(path: str | os.PathLike) -> dict[str, str]:
    """Return the metadata of a safetensors file. Raises OSError if the file cannot be opened, and ValueError if it is
    not a safetensors file."""
    with open(path, "rb"):  # raises the file system's own error, which `safe_open` would hide
        pass
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except (SafetensorError, ValueError, OSError) as error:
        raise ValueError(f"it is not a safetensors file: {error}") from None


def tensors(path: str | os.PathLike, verify: bool = True) -> dict[str, Tensor]:
    """Return the tensors of a file that `write` wrote, as private memory maps: pages are read when they are needed, and
    shared by all processes. Raises ValueError for a damaged file; verify=False does not compare the checksum."""
    if verify:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if not is_whole(data):
                raise ValueError("its checksum is not that of its content")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError, OSError) as error:
        raise ValueError(f"it cannot be read: {error}") from None


def write_pair(
    weights: str | os.PathLike, config: str | os.PathLike, tensors: dict[str, Tensor], facts: dict[str, Any]
) -> None:
    """Write tensors to the file `weights`, and facts with a checksum of both files to the JSON file `config`. Each file
    is written completely or not at all. Raises OSError if a file cannot be written."""
    data = safetensors.torch.save(tensors, metadata={"format": "pt"})
    text = bytearray(json.dumps({**facts, NAME: EMPTY}, indent=2) + "\n", "utf-8")
    seal(text, zlib.crc32(data))
    write_bytes(weights, data)
    write_bytes(config, bytes(text))


def tensors_of_pair(weights: str | os.PathLike, config: str | os.PathLike) -> dict[str, Tensor]:
    """Return the tensors that `write_pair` wrote. Raises OSError for a missing file, ValueError for a damaged one."""
    data = Path(weights).read_bytes()
    if not is_whole(Path(config).read_bytes(), zlib.crc32(data)):
        raise ValueError(f"its checksum is not the one in {Path(config).name}")
    try:
        return safetensors.torch.load(data)
    except SafetensorError as error:
        raise ValueError(f"it cannot be read: {error}") from None
