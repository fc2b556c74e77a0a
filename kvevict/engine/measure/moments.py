"""Mean, covariance and mean size of a layer's queries before rotation (RoPE), taken over the text read so far or read
from a file that `kvevict statistics` wrote. Rotation acts on pairs (x, y) of dimensions; the size of both dimensions of
a pair is sqrt(x^2 + y^2)."""

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
BLOCK = 1024  # number of queries that are converted to fp32 at once
_loaded: WeakKeyDictionary = WeakKeyDictionary()  # decoder -> {path of a file: result of `load`}


def sizes(x: torch.Tensor, partner: torch.Tensor) -> torch.Tensor:
    """The size of each dimension of x [..., D], which rotation does not change: sqrt(x^2 + y^2) for a dimension x that
    is rotated with y, or |x| for one that is not rotated. partner [D]: result of `Rope.partners`."""
    alone = partner == torch.arange(len(partner), device=partner.device)
    return torch.where(alone, x.abs(), (x.square() + x[..., partner].square()).sqrt())


def added(
    past: torch.Tensor | None, queries: torch.Tensor, counts: torch.Tensor, size: torch.Tensor | None = None
) -> torch.Tensor:
    """Add queries to moments. Returns the moments, fp32 [B, H, 1 + D, 1 + D]: at [0, 0] the number of queries, in the
    rest of row 0 their mean, in the rest of column 0 their mean size, and elsewhere [D, D] the sum over queries of
    (q - mean) (q - mean)^T.

    past      moments of earlier queries; None: there are no earlier queries
    queries   fp32 [B, H, T, D]
    counts    bool [B, T] True for the queries to add
    size      [B, H, T, D] the queries' `sizes`; None: mean sizes are not needed, and stay 0
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
    """Rotate queries [B, H, T, D] back from their positions [B, T] and add those with counts [B, T] to the moments
    `past`, block by block. Returns the moments in the form that `added` describes."""
    partner = rope.partners(queries.shape[3], queries.device)
    for start in range(0, queries.shape[2], BLOCK):
        rows = slice(start, start + BLOCK)
        block = rope.unrotated(queries[:, :, rows], positions[:, rows])
        past = added(past, block, counts[:, rows], sizes(block, partner))
    return past  # type: ignore[return-value]  # not None: there is at least one query


def summed(moments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute (mean [B, H, D], covariance [B, H, D, D], mean size [B, H, D]) from moments, a result of `added`; all are
    0 if no query was added."""
    number = moments[..., :1, :1].clamp_min(1)
    return moments[..., 0, 1:], moments[..., 1:, 1:] / number, moments[..., 1:, 0]


def model_of(decoder: Any) -> dict:
    """The facts about a model that determine its queries, in the form that `save` writes."""
    config = decoder.config
    rope = getattr(config, "rope_parameters", None)
    facts = dict(
        model_type=config.model_type, layers=len(families.layer_kinds(config)), heads=families.heads(config),
        hidden_size=config.hidden_size, rope=rope, weights=fingerprint(decoder),
    )  # fmt: skip
    return json.loads(json.dumps(facts, default=str))


def other_model(facts: dict, decoder: Any) -> str:
    """Describe the first difference between a file's facts about its model and `model_of(decoder)`; "" if there is
    none."""
    for name, value in model_of(decoder).items():
        known = facts.get(name)
        if differ(known, value) if name == "weights" else known != value:
            return f"its {name} {'are' if name.endswith('s') else 'is'} {known!r}, this model's {value!r}"
    return ""


def save(path: str | os.PathLike, decoder: Any, moments: dict, **about: Any) -> None:
    """Write a decoder's moments {layer: [H, 1 + D, 1 + D]} to a file, with facts about the model and the further facts
    `about`."""
    facts = model_of(decoder) | about
    tensors = {}
    for index, each in moments.items():
        tensors |= {f"{index}.{name}": x.contiguous() for name, x in zip(NAMES, summed(each), strict=True)}
    sealed.write(path, tensors, dict(format=FORMAT, config=json.dumps(facts)))


def load(path: str | Path, decoder: Any) -> dict[int, tuple[torch.Tensor, ...]]:
    """Read {layer: (mean [H, D], covariance [H, D, D], mean size [H, D])} from a file, for the layers that evict.
    Raises ValueError if the file is missing or damaged, or, naming the difference, if it is of another model."""
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
    """Return what `load` reads from a file; it is read once for a decoder, or again with `anew`, as the file may have
    changed."""
    if anew:
        _loaded.pop(decoder, None)
    known = _loaded.setdefault(decoder, {})
    if path not in known:
        known[path] = load(path, decoder)
    return known[path]
