"""Saves a cache to a file without making a copy of its slots in memory."""

import json
import os
import warnings
from dataclasses import asdict
from itertools import chain
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import CacheLayerMixin

from ..engine.memory.cache import EvictionCache
from ..engine.memory.carried import wide
from ..engine.memory.layer import HALF_READ, EvictionLayer
from ..engine.memory.mapped import is_folder
from ..engine.memory.stateful import StatefulLayer
from ..models import families
from ..policy.kv import KINDS
from ..policy.policy import Policy
from ..version import VERSION
from . import sealed
from .form import FLAT, FORMAT, OF_ROWS, OPTIONAL, WORDS, WRONG, check, steps_of


def save_cache(cache: EvictionCache, path: str | os.PathLike, *, name: str = "") -> None:
    """Write a cache that a patched model filled to the file `path` (safetensors, with permissions 0600).

    cache   `past_key_values` of a patched model's output; with recall=True the slots of all tokens are written
    path    the file, which is replaced if it exists
    name    a text that the file's metadata gets under the key `name`; the checksum covers it

    In tensor parallel all ranks must call this function: the first rank writes a file with the heads of all ranks,
    which any number of ranks can load. Raises ValueError for a cache that kvevict did not fill. Raises OSError if the
    file cannot be written, and then leaves `path` unchanged.
    """
    if not isinstance(cache, EvictionCache):
        raise ValueError(
            f"a {type(cache).__name__} that was not filled by kvevict: read a prompt with a patched model first"
        )
    if cache.sequence.half_read:
        raise ValueError(HALF_READ)
    write(cache, path, dict(name=name))


def write(cache: EvictionCache, path: str | os.PathLike, texts: dict[str, str], sync: bool = True) -> None:
    """Write a cache to a file. texts: entries added to the file's metadata, or replacing some of it; sync: whether the
    data must be on the disk before the file gets its name."""
    sequence, ranks, failed = cache.sequence, cache.ranks, None
    tensors, facts = _contents(cache)
    following = None if sequence.next_position is None else sequence.next_position.tolist()
    common: dict[str, Any] = dict(packed=sequence.packed, next_position=following, kvevict=VERSION)
    weights, configuration = cache.owner.identity() or (None, None)
    run = asdict(sequence.run) | dict(archive=True if is_folder(sequence.run.archive) else sequence.run.archive)
    common |= dict(weights=weights, configuration=configuration, policy=_text_of(sequence.policy), run=run)
    if ranks.size > 1:
        tensors = {name: sealed.whole(t).clone() for name, t in tensors.items()}
    parts = ranks.to_first(tensors)
    if parts is not None:
        try:
            all_heads = tensors if len(parts) == 1 else _joined(parts)
            for index, fact in enumerate(facts):
                if fact["kind"] == families.FULL_ATTENTION:
                    fact |= _positions_fact(index, all_heads, max([cache.get_seq_length(), *(following or ())]))
            try:
                check(all_heads, facts, common)
            except WRONG as error:
                raise ValueError(f"this cache cannot be saved, no file of it could be loaded: {error}") from None
            metadata = {"format": FORMAT, "layers": json.dumps(facts), "cache": json.dumps(common)}
            sealed.write(path, all_heads, metadata | texts, sync)
        except Exception as error:
            failed = error
    failed = ranks.objects(failed)[0]  # the first rank's error, which every rank then raises
    if failed is not None:
        raise failed


def _contents(cache: EvictionCache) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return (the tensors of a cache, by names "LAYER.NAME"; the facts of each layer, for the file's metadata)."""
    sequence, tensors, facts = cache.sequence, {}, []
    for index, layer in enumerate(cache.layers):
        if type(layer).__name__ == "DummyLayer":
            facts.append(dict(kind=families.NOTHING, columns=cache.get_seq_length()))
            continue
        if isinstance(layer, StatefulLayer) or not isinstance(layer, CacheLayerMixin):
            raise ValueError(
                f"layer {index} keeps a recurrent state, which save_cache cannot write; keep the cache in memory"
            )
        if isinstance(layer, EvictionLayer) and layer.is_initialized:
            every = cache.tiers.pieces(index)
            slots, values = every[0], _rows(layer, every) | {name: getattr(layer, name) for name in OPTIONAL}
            values["seen"] = torch.tensor(sequence.seen, dtype=torch.int32, device=layer.device)
            values["centre"] = slots.centre
            values["moments"] = _moments(layer, index)
            values["carry"] = None if layer.carry is None else wide(layer.carry, int(values["len"].max()))
            values["budget"] = None if layer.budget is None else torch.tensor(layer.budget, dtype=torch.int32)
            own = None if layer.prompt is None else cache.ranks.mine(layer.prompt)
            values["prompt"] = None if own is None else torch.tensor(own, dtype=torch.int32)
            fact, kinds = dict(kind=families.FULL_ATTENTION, columns=sequence.columns), slots.kinds
            packed_as = dict(bits=[WORDS[kind] for kind in kinds])
            facts.append(fact if kinds == KINDS["model"] else fact | packed_as)
        elif getattr(layer, "is_sliding", False) and layer.is_initialized:
            window = layer.sliding_window  # type: ignore[attr-defined]
            start = max(0, layer.keys.shape[2] - window + 1)  # the cache has older tokens, too, while it may be cropped
            values = {name: getattr(layer, name)[:, :, start:] for name in ("keys", "values")}
            facts.append(dict(kind=families.SLIDING, columns=layer.cumulative_length, window=window))
        else:
            raise ValueError(f"layer {index}, a {layer!r}, was not filled by kvevict; read with a patched model first")
        tensors |= {f"{index}.{name}": t for name, t in values.items() if t is not None}
    return tensors, facts


def _rows(layer: EvictionLayer, every: list) -> dict[str, Any]:
    """Return `len`, the number of slots of each kv head, and keys, values and positions of all slots as `Pieces` in the
    order of `FLAT`. every: the storages that hold the layer's slots; a head's slots in a storage come before its slots
    in the next storage."""
    counts, places = torch.zeros_like(layer.len, device="cpu"), []
    for b, h in np.ndindex(layer.counts.shape):
        for storage, rows in chain.from_iterable(slots.places(b, h) for slots in every):
            counts[b, h] += rows.stop - rows.start
            places.append((storage, rows))

    def pieces(name: str) -> sealed.Pieces:
        like = getattr(places[0][0], name)
        shape = int(counts.sum()), *like.shape[1:]
        return sealed.Pieces(shape, like.dtype, lambda: (getattr(storage, name)[rows] for storage, rows in places))

    return dict(len=counts.to(layer.device)) | {name: pieces(name) for name in FLAT}


def _moments(layer: EvictionLayer, index: int) -> torch.Tensor | None:
    """Return the moments of a layer's queries (None: the policy needs none). Raises ValueError if the layer remembers
    another quantity, which a file cannot hold."""
    others = sorted(layer.memory.keys() - {"moments"})
    if others:
        raise ValueError(
            f"layer {index} remembers {', '.join(others)} for a quantity, which save_cache cannot write; keep the "
            "cache in memory"
        )
    return layer.memory.get("moments")


def _positions_fact(index: int, tensors: dict, end: int) -> dict:
    """Return two facts of layer `index`. `end` is larger than all positions of the layer's slots, and at least the
    argument `end`. `ties` says whether a head has slots with equal positions, as the tokens of a picture have."""
    pos = sealed.whole(tensors[f"{index}.pos"])
    steps = steps_of(pos, tensors[f"{index}.len"])
    if bool((steps < 0).any()) or bool((pos < 0).any()):
        raise ValueError(f"layer {index} has positions that do not ascend; read with ascending position_ids to save")
    return dict(end=max(end, int(pos.max()) + 1 if pos.numel() else 0), ties=bool((steps == 0).any()))


def _joined(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Join the tensors of all tensor-parallel ranks, each with its own heads, to tensors with all heads."""
    whole = {}
    for name in parts[0]:
        index, kind = name.split(".", 1)
        each = [part[name].cpu() for part in parts]
        if kind in FLAT:  # slots by batch row, then by head
            lens = [part[f"{index}.len"] for part in parts]
            rows = [t.split(n.flatten().tolist()) for t, n in zip(each, lens, strict=True)]
            batch, heads = lens[0].shape
            whole[name] = torch.cat([r[b * heads + h] for b in range(batch) for r in rows for h in range(heads)])
        elif kind in OF_ROWS:
            whole[name] = each[0]
        else:
            longest = max(t.shape[2] for t in each) if kind == "carry" else 0
            if longest:
                each = [wide(t, longest) for t in each]
            whole[name] = torch.cat(each, 1)
    return whole


def _text_of(policy: Policy | None) -> str | None:
    """Return a policy as JSON; None if there is no policy, or, with a warning, for a policy that JSON cannot hold."""
    try:
        return None if policy is None else policy.to_json()
    except ValueError as error:
        warnings.warn(
            f"the file cannot name the cache's policy ({error}): once it is loaded, answers attend to all of its "
            "slots, and none recalls; save a cache that was read with a policy of registered parts",
            stacklevel=4,
        )
        return None
