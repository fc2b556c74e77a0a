"""Files with a checksum over every byte: safetensors, and JSON with a checksum that covers the file beside it too.

The checksum is a CRC-32 of the file with the checksum's eight digits set to zeros, so a field of the same file can hold
it. It detects damage, not forgery.
"""

import json
import mmap
import os
import re
import zlib
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .files import replacing
from .files import write as write_bytes

NAME, EMPTY = "checksum", "0" * 8  # the field, and its content while the checksum is computed
FIELD = re.compile(rb'"checksum": ?"([0-9a-f]{8})"')


def seal(data: bytearray | mmap.mmap, before: int = 0) -> None:
    """Write the checksum of bytes (a bytearray or a mapped file) into their field. before: the checksum of other bytes
    that this one continues."""
    start, digits = _checksum(data, before)
    data[start : start + len(digits)] = digits


def is_whole(data: bytes | bytearray | mmap.mmap, before: int = 0) -> bool:
    """Whether bytes have the checksum that they name."""
    found = _checksum(data, before)
    return found is not None and data[found[0] : found[0] + len(EMPTY)] == found[1]


def _checksum(data: Any, before: int) -> Any:
    """(where the field's digits start, the digits that belong there), or None without the field."""
    field = FIELD.search(data)
    if field is None:
        return None
    start, stop = field.span(1)
    del field  # or the file stays mapped
    with memoryview(data) as whole, whole[:start] as head, whole[stop:] as tail:
        value = zlib.crc32(tail, zlib.crc32(EMPTY.encode(), zlib.crc32(head, before)))
    return start, f"{value:08x}".encode()


def write(path: str | os.PathLike, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write tensors and texts to a safetensors file, whole or not at all. Raises OSError where that is impossible."""
    with replacing(path) as temporary:
        try:
            save_file(tensors, temporary, metadata=metadata | {NAME: EMPTY})
        except SafetensorError as error:
            code = re.search(r"os error (\d+)", str(error))
            raise OSError(*(int(code[1]), os.strerror(int(code[1]))) if code else [str(error)]) from None
        with open(temporary, "r+b") as file, mmap.mmap(file.fileno(), 0) as data:
            seal(data)


def texts(path: str | os.PathLike) -> dict[str, str]:
    """The texts of a safetensors file. Raises ValueError if it is not one, and OSError if it cannot be read."""
    with open(path, "rb"):  # or the file system's own error
        pass
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except (SafetensorError, ValueError, OSError) as error:
        raise ValueError(f"it is not a safetensors file: {error}") from None


def tensors(path: str | os.PathLike, verify: bool = True, mapped: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    """The tensors of a file of `write`, copied out of it, but for names that end with one of `mapped`: these stay in
    the file, mapped privately. Raises ValueError if the file does not match its checksum; verify=False does not check
    that."""
    if verify:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if not is_whole(data):
                raise ValueError("its checksum is not that of its content")
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError, OSError) as error:
        raise ValueError(f"it cannot be read: {error}") from None
    return {name: t if name.endswith(mapped) else t.clone() for name, t in found.items()}


def write_pair(
    weights: str | os.PathLike, config: str | os.PathLike, tensors: dict[str, torch.Tensor], facts: dict[str, Any]
) -> None:
    """Write tensors to the file `weights`, and facts with a checksum of both to the JSON file `config`: each file whole
    or not at all. Raises OSError where that is impossible."""
    data = safetensors.torch.save(tensors, metadata={"format": "pt"})
    said = bytearray(json.dumps({**facts, NAME: EMPTY}, indent=2) + "\n", "utf-8")
    seal(said, zlib.crc32(data))
    write_bytes(weights, data)
    write_bytes(config, bytes(said))


def tensors_of_pair(weights: str | os.PathLike, config: str | os.PathLike) -> dict[str, torch.Tensor]:
    """The tensors that `write_pair` wrote. Raises OSError or ValueError where they are missing or damaged."""
    data = Path(weights).read_bytes()
    if not is_whole(Path(config).read_bytes(), zlib.crc32(data)):
        raise ValueError(f"its checksum is not the one in {Path(config).name}")
    try:
        return safetensors.torch.load(data)
    except SafetensorError as error:
        raise ValueError(f"it cannot be read: {error}") from None
