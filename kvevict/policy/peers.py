"""The names of our options in other libraries (kvpress, KVCache-Factory, AdaKV)."""

from typing import Any

BUDGET = "budget=, the slots kept per kv head (int)"
NAMES = {
    "compression_ratio": "budget=, the fraction that is kept: 1 - compression_ratio",
    "max_capacity_prompt": BUDGET,
    "max_capacity_prompts": BUDGET,
    "max_capacity": BUDGET,
    "base_capacity": BUDGET,
    "cache_size": BUDGET,
    "target_size": f"{BUDGET}, with decode=True",
    "compression_interval": "interval=, with decode=True",
    "window_size": "window=",
    "observation_window": "window=",
    "recent_size": "recent=",
    "kernel_size": "kernel=",
    "pooling": "pool=",
    "n_sink": "sink=",
    "num_sinks": "sink=",
    "start_size": "sink=",
    "chunk_length": "chunk_size=, the tokens that are read at once",
    "block_size": "chunk_size=, the tokens that are read at once",
    "alpha_safeguard": "f=",
    "floor_alpha": "f=",
    "epsilon": "eps=",
}


def check(names: Any) -> None:
    """Raise ValueError, with our name for it, for an option of another library."""
    for name in names:
        if name in NAMES:
            raise ValueError(
                f"unknown option {name!r}: here it is {NAMES[name]}; docs/migrating.md has other libraries' names"
            )
