"""The options of a server and their defaults."""

from dataclasses import dataclass

from ..policy.text import DEFAULT

AUTO, NEVER, ALWAYS = SHARES = "auto", "never", "always"  # of `share`


@dataclass(frozen=True)
class Options:
    """The options of `kvevict serve` (docs/commands.md). memory bounds the bytes of prefixes, and again those of
    running answers; disk those of all files."""

    policy: str = DEFAULT
    unasked: str | None = None  # None: as `kvevict.read` without a policy
    budget: int | float | str = 512
    chunk_size: int | None = 512
    kv: str = "model"
    share: str = AUTO
    share_budget: int | float = 0.5
    share_kv: str | None = None  # None: "int8" where the model's slots can be, or the kv that is given
    dtype: str = "auto"
    device: str | None = None
    name: str | None = None
    memory: int = 1 << 30
    store: str | None = None
    disk: int = 4 << 30
    keys: tuple[str, ...] = ()
    batch: int = 16
    queue: int = 64
    stall: float = 0.5
    timeout: float = 600.0
    gates: str | None = None
    hosts: tuple[str, ...] = ()
