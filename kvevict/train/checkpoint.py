"""Writes and reads the checkpoints of trainings. A training continues only with equal settings."""

import io
from pathlib import Path
from typing import Any

import torch

from ..store.files import write


def save(path: Path, about: dict, **state: object) -> None:
    """Write a checkpoint, completely or not at all. about: settings and data that determine the training's result."""
    buffer = io.BytesIO()
    torch.save(dict(state, about=about), buffer)
    write(path, buffer.getvalue())


def load(path: Path, about: dict, device: torch.device) -> dict[str, Any]:
    """Read a checkpoint's state, or return {} if there is no file. Raises ValueError for a damaged checkpoint and for
    one with another `about`; only `steps` may be more than the checkpoint's, once these have been made."""
    if not path.exists():
        return {}
    try:
        state = torch.load(path, map_location=device, weights_only=True)
        found = state["about"]
    except Exception as error:  # pickle, zip and torch raise different errors
        raise ValueError(f"{path} is damaged ({error}); remove it to start anew") from error
    for name, value in about.items():
        lengthened = name == "steps" and state["step"] == found.get(name) < value
        if found.get(name) != value and not lengthened:
            raise ValueError(
                f"{path} is of a training with {name}={found.get(name)!r}, this one has {value!r}; continue with the "
                "same, or give another `out`"
            )
    return state
