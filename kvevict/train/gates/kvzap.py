"""Converts KVzap's published gates to a folder that kvevict reads."""

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from ...engine.measure.gates import Gates
from ...engine.measure.moments import model_of
from ...models import families
from ...policy.checks import parsed

WEIGHTS, CONFIG = "model.safetensors", "config.json"
KIND = "kvzap"  # `model_type` in the config of KVzap's gates
PARTS = {"linear": ("",), "mlp": ("0.", "2.")}  # kind -> for each affine map, the name between `layers.N.` and `weight`


def convert(source: str | os.PathLike, model: Any, out: str | os.PathLike) -> Gates:
    """Save KVzap's published gates (Jegou and Jeblick 2026; kvpress' KVzapModel) in the folder `out`, and return them.

    source   folder with config.json and model.safetensors, or a hub id such as nvidia/KVzap-mlp-Qwen3-8B
    model    the model that the gates were trained on. The source does not name that model, so only the sizes of `model`
             can be checked, not its weights

    The source's layer N is decoder layer N. KVzap's gates take the same input as kvevict's and predict the logarithm of
    the score `kvzip+`. No code of the source is run, and no pickle is read. Raises ValueError, and writes nothing, if
    the source does not hold KVzap's gates, is damaged, or has the sizes of another model; OSError if `out` cannot be
    written.
    """
    name, decoder, place = repr(os.fspath(source)), families.find_decoder(model), Path(source)
    if place.resolve() == Path(out).resolve():
        raise ValueError(f"out is the folder {name} that is converted: give another")
    config = _config(_file(source, CONFIG, name), name)
    inner, count = config.get("hidden_dim"), len(families.layer_kinds(decoder.config))
    wide, narrow = decoder.config.hidden_size, families.slot_heads(decoder.config)
    for key, what, size in (("input_dim", "hidden size", wide), ("output_dim", "number of kv heads", narrow),
                            ("n_modules", "number of layers", count)):  # fmt: skip
        if config.get(key) != size:
            raise ValueError(
                f"{name} is of another model: its {key} is {config.get(key)}, this model's {what} is {size}; give "
                "the model that it was trained on"
            )
    weights = _file(source, WEIGHTS, name)
    try:
        tensors = safetensors.torch.load_file(weights)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{WEIGHTS} of {name} is damaged or no safetensors ({error}); fetch it again") from None
    kind, sizes = ("linear", (wide, narrow)) if inner is None else ("mlp", (wide, inner, narrow))
    layers = {}
    for layer in families.evicting(decoder.config):
        pairs = zip(PARTS[kind], pairwise(sizes), strict=True)
        layers[layer] = tuple(_affine(tensors, f"layers.{layer}.{part}", *pair, name) for part, pair in pairs)
    about = dict(kind=kind, label="kvzip+", source=os.fspath(source), base=model_of(decoder))
    made = Gates(layers, about | ({} if inner is None else dict(inner=inner)))
    made.save(out)
    return made


def _file(source: str | os.PathLike, file: str, name: str) -> Path:
    """Return the path of a file in `source`, a folder or hub id. Raises ValueError if the file is missing; `name` is
    the source's name in the error."""
    if Path(source).is_dir():
        if (path := Path(source) / file).is_file():
            return path
        raise ValueError(f"{name} has no {file}; give KVzap's published folder: {CONFIG} and {WEIGHTS}, no pickle")
    from transformers.utils import cached_file

    try:
        return Path(str(cached_file(os.fspath(source), file)))
    except OSError as error:
        raise ValueError(
            f"{name} is not a folder, and the hub has not given its {file} ({error}); give a folder with {CONFIG} and "
            f"{WEIGHTS}, or a hub id such as nvidia/KVzap-mlp-Qwen3-8B"
        ) from None


def _config(path: Path, name: str) -> dict:
    """Read the config of KVzap's gates. Raises ValueError for any other file; `name` is the source's name in it."""
    try:
        config = parsed(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{CONFIG} of {name} is damaged ({error}); fetch it again") from None
    if not isinstance(config, dict) or config.get("model_type") != KIND:
        raise ValueError(f"{CONFIG} of {name} is not KVzap's: its model_type is not {KIND!r}; give KVzap's gates")
    inner = config.get("hidden_dim")
    if inner is not None and (type(inner) is not int or inner < 1):
        raise ValueError(f"{CONFIG} of {name} is damaged: hidden_dim must be a size or null, got {inner!r}")
    return config


def _affine(tensors: dict[str, torch.Tensor], prefix: str, inputs: int, outputs: int, name: str) -> tuple:
    """Return the affine map that is stored under `prefix`, as fp32 (weight [outputs, inputs], bias [outputs]). Raises
    ValueError if it is missing or damaged; `name` is the source's name in the error."""
    found = []
    for part, shape in (("weight", (outputs, inputs)), ("bias", (outputs,))):
        x = tensors.get(prefix + part)
        if x is None or tuple(x.shape) != shape or not x.is_floating_point() or not x.isfinite().all():
            got = "is missing" if x is None else f"is {x.dtype} {list(x.shape)}"
            raise ValueError(
                f"{WEIGHTS} of {name} is damaged: {prefix}{part} {got}, where finite numbers {list(shape)} belong; "
                "fetch it again"
            )
        found.append(x.to(torch.float32))
    return tuple(found)
