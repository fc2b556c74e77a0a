"""Mean, covariance and sizes of a layer's queries before rotation, of the text read so far or, from a file, of other
text. Rotation acts on pairs (x, y) of dimensions; the size of either dimension is sqrt(x^2 + y^2)."""

import json
import os
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ...models import families
from ...models.weights import differ, fingerprint
from ...policy.checks import parsed
from ...store import sealed
from .rope import Rope

FORMAT = "kvevict-queries-3"
NAMES = ("mean", "covariance", "size")
BLOCK = 1024  # rows that are converted to fp32 at once
_loaded: WeakKeyDictionary = WeakKeyDictionary()  # decoder -> {file: its contents}


def sizes(x: torch.Tensor, partner: torch.Tensor) -> torch.Tensor:
    """The size of each dimension of x [..., D], which rotation leaves: sqrt(x^2 + y^2) with its `Rope.partners` y, or
    |x| of a dimension that is its own partner."""
    alone = partner == torch.arange(len(partner), device=partner.device)
    return torch.where(alone, x.abs(), (x.square() + x[..., partner].square()).sqrt())


def added(
    past: torch.Tensor | None, queries: torch.Tensor, counts: torch.Tensor, size: torch.Tensor | None = None
) -> torch.Tensor:
    """Add rows to moments: fp32 [B, H, 1 + D, 1 + D] with the number of rows at [0, 0], their mean in the rest of row
    0, their mean size in the rest of column 0, and elsewhere the sum of products of their distances from the mean.

    past      moments of earlier rows; None: of no rows
    queries   fp32 [B, H, T, D]
    counts    bool [B, T] the rows to add
    size      [B, H, T, D] result of `sizes`; None: 0
    """
    one, rest, inside = slice(0, 1), slice(1, None), counts[:, None, :, None]
    new = queries.new_zeros(*queries.shape[:2], 1 + queries.shape[3], 1 + queries.shape[3])
    number = counts.sum(1)[:, None, None, None].float()
    mean = queries.masked_fill(~inside, 0).sum(2, keepdim=True) / number.clamp_min(1)
    distance = (queries - mean).masked_fill(~inside, 0)
    new[..., one, one], new[..., one, rest], new[..., rest, rest] = number, mean, distance.mT @ distance
    if size is not None:
        new[..., rest, one] = (size.masked_fill(~inside, 0).sum(2, keepdim=True) / number.clamp_min(1)).mT
    if past is None:
        return new
    before, total = past[..., one, one], past[..., one, one] + number
    moved, share = mean - past[..., one, rest], number / total.clamp_min(1)
    new[..., rest, one] = past[..., rest, one] + share * (new[..., rest, one] - past[..., rest, one])
    new[..., one, one], new[..., one, rest] = total, past[..., one, rest] + share * moved
    new[..., rest, rest] += past[..., rest, rest] + before * share * moved.mT @ moved
    return new


def accumulated(
    past: torch.Tensor | None, rope: Rope, queries: torch.Tensor, positions: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """Add rotated queries [B, H, T, D] at positions [B, T] to moments, as `added`, block by block."""
    partner = rope.partners(queries.shape[3], queries.device)
    for start in range(0, queries.shape[2], BLOCK):
        rows = slice(start, start + BLOCK)
        block = rope.unrotated(queries[:, :, rows], positions[:, rows])
        past = added(past, block, counts[:, rows], sizes(block, partner))
    return past  # type: ignore[return-value]  # there are rows


def summed(moments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(mean [B, H, D], covariance [B, H, D, D], mean size [B, H, D]) of moments; 0 if no row was added."""
    number = moments[..., :1, :1].clamp_min(1)
    return moments[..., 0, 1:], moments[..., 1:, 1:] / number, moments[..., 1:, 0]


def model_of(decoder: Any) -> dict:
    """The facts of a model that determine its queries, as they are written to files."""
    config = decoder.config
    rope = getattr(config, "rope_parameters", None)
    facts = dict(
        model_type=config.model_type, layers=len(families.layer_kinds(config)), heads=families.heads(config),
        hidden_size=config.hidden_size, rope=rope, weights=fingerprint(decoder),
    )  # fmt: skip
    return json.loads(json.dumps(facts, default=str))


def other_model(facts: dict, decoder: Any) -> str:
    """A text on the first difference between facts from a file and `model_of` this decoder; "" if they are equal."""
    for name, value in model_of(decoder).items():
        known = facts.get(name)
        if differ(known, value) if name == "weights" else known != value:
            return f"its {name} {'are' if name.endswith('s') else 'is'} {known!r}, this model's {value!r}"
    return ""


def save(path: str | os.PathLike, decoder: Any, moments: dict, **about: Any) -> None:
    """Write a decoder's moments {layer: [H, 1 + D, 1 + D]} to a file. about: further facts for it."""
    facts = model_of(decoder) | about
    tensors = {}
    for index, each in moments.items():
        tensors |= {f"{index}.{name}": x.contiguous() for name, x in zip(NAMES, summed(each), strict=True)}
    sealed.write(path, tensors, dict(format=FORMAT, config=json.dumps(facts)))


def load(path: str | Path, decoder: Any) -> dict[int, tuple[torch.Tensor, ...]]:
    """Read {layer: (mean [H, D], covariance [H, D, D], mean size [H, D])} of the layers that evict from a file. Raises
    ValueError for a file that is missing, damaged, or of another model (naming the difference)."""
    path, again = os.fsdecode(path), "give a file that `kvevict statistics` wrote for this model"
    if not Path(path).is_file():
        raise ValueError(f"stats: {path!r} does not exist; {again}")
    try:
        metadata = sealed.texts(path)
        config = parsed(metadata.get("config", "null"))
        if metadata.get("format") != FORMAT or not isinstance(config, dict):
            raise ValueError(f"its format is {metadata.get('format')!r}, this version's {FORMAT!r}")
        tensors = sealed.tensors(path)
    except (ValueError, OSError) as error:
        raise ValueError(f"stats: {path!r} cannot be read ({error}); {again}") from None
    if other := other_model(config, decoder):
        raise ValueError(f"stats: {path!r} is of another model: {other}; {again}")
    heads, found = families.heads(decoder.config)[0], {}
    for index in families.evicting(decoder.config):
        each = [tensors.get(f"{index}.{name}") for name in NAMES]
        width = None if each[0] is None or each[0].ndim != 2 else each[0].shape[1]
        shapes = [None if x is None else (x.dtype, tuple(x.shape)) for x in each]
        if shapes != [(torch.float32, (heads, width, width)[: 2 + square]) for square in (0, 1, 0)]:
            raise ValueError(f"stats: {path!r} is damaged: its tensors of layer {index} do not fit; {again}")
        found[index] = tuple(x.clone() for x in each)
    return found


def loaded(path: str | Path, decoder: Any, anew: bool = False) -> dict[int, tuple[torch.Tensor, ...]]:
    """`load` a file once for a decoder, or anew, since the file may have changed."""
    if anew:
        _loaded.pop(decoder, None)
    known = _loaded.setdefault(decoder, {})
    if path not in known:
        known[path] = load(path, decoder)
    return known[path]
