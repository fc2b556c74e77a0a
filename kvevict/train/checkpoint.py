"""Writes and reads checkpoints of a training. A training continues from a checkpoint only with the same settings."""

import io
from pathlib import Path
from typing import Any

import torch

from ..store.files import write


def save(path: Path, about: dict, **state: object) -> None:
    """Write a checkpoint with `state`, completely or not at all. about: the settings, and a digest of the data, that
    determine the training's result."""
    buffer = io.BytesIO()
    torch.save(dict(state, about=about), buffer)
    write(path, buffer.getvalue())


def load(path: Path, about: dict, device: torch.device) -> dict[str, Any]:
    """Return the state in a checkpoint, or {} if the file does not exist. Raises ValueError if the checkpoint is
    damaged or has another `about`; only `about["steps"]` may be larger, if the checkpoint's training has finished."""
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
