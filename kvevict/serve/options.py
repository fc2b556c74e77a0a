"""The options of a server and their defaults."""

from dataclasses import dataclass

from ..policy.checks import SLOTS
from ..policy.text import DEFAULT


@dataclass(frozen=True)
class Options:
    """The options of `kvevict serve` (docs/commands.md)."""

    policy: str = DEFAULT
    budget: int | float | str = SLOTS
    chunk_size: int | None = 512  # less than `CHUNK`, since a prompt waits while a chunk of another one is read
    kv: str = "model"
    dtype: str = "auto"
    device: str | None = None
    name: str | None = None
    memory: int = 1 << 30  # most bytes of stored prefixes in memory; answers may take as many again
    store: str | None = None
    disk: int = 4 << 30  # most bytes of all files in the folder `store`
    keys: tuple[str, ...] = ()
    batch: int = 16
    queue: int = 64
    timeout: float = 600.0
    hosts: tuple[str, ...] = ()
