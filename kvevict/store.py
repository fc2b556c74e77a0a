"""Save and load a compressed cache: a prompt is read once, questions are asked later."""

import json
import os
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import CacheLayerMixin, DynamicCache

from . import families, sealed
from .engine.slots.adopt import EvictionCache, adopt
from .engine.slots.cache import HALF_READ, EvictionLayer
from .engine.slots.carried import of_layer, wide
from .engine.slots.latent import LatentLayer
from .engine.slots.layers import StatefulLayer
from .engine.slots.ranks import of
from .engine.slots.storage import Storage
from .policy.checks import count, parsed
from .policy.kv import KINDS, LAYOUTS, MODEL, row_bytes
from .policy.policy import Policy
from .version import VERSION
from .weights import Identity, Owner, identity

FORMAT = "kvevict-cache-5"
FLAT = ("k", "v", "pos")
OPTIONAL = ("carry", "decode_queries")
OF_ROWS = ("seen", "budget")  # one value for all heads of a row
WORDS = [layout.word for layout in LAYOUTS]


def save_cache(cache: EvictionCache, path: str | os.PathLike, *, name: str = "") -> None:
    """Write a cache that a patched model filled to `path` (safetensors).

    cache   `past_key_values` of a patched model's output. Raises ValueError when kvevict did not fill it. Of a cache
            that was read with recall=True the slots of all tokens are written
    name    a text for the file's metadata, under `name`; the checksum covers it

    In tensor parallel all ranks call this: the first rank writes one file with the heads of all, and any number of
    ranks can load it. Raises OSError, and leaves `path` unchanged, if the file cannot be written.
    """
    if not isinstance(cache, EvictionCache):
        raise ValueError(
            f"a {type(cache).__name__} that was not filled by kvevict: read a prompt with a patched model first"
        )
    if cache.sequence.half_read:
        raise ValueError(HALF_READ)
    cache = cache.recalled()
    sequence = cache.sequence
    tensors, facts = {}, []
    for index, layer in enumerate(cache.layers):
        if type(layer).__name__ == "DummyLayer":
            facts.append(dict(kind=families.NOTHING, columns=cache.get_seq_length()))
            continue
        if isinstance(layer, StatefulLayer) or not isinstance(layer, CacheLayerMixin):
            raise ValueError(
                f"layer {index} keeps a recurrent state, which save_cache cannot write; keep the cache in memory"
            )
        if isinstance(layer, EvictionLayer) and layer.is_initialized:
            slots = layer.storage.gathered()
            packed = torch.cat([torch.arange(s.start, s.stop) for _, _, s in slots.segments()])
            values: dict = dict(k=slots.k[packed], v=slots.v[packed], pos=slots.pos[packed])
            values |= {name: getattr(layer, name) for name in ("len", *OPTIONAL)}
            values["seen"] = torch.tensor(sequence.seen, dtype=torch.int32, device=layer.device)
            values["centre"] = layer.centre
            values["moments"] = _moments(layer, index)
            values["carry"] = None if layer.carry is None else wide(layer.carry, layer.longest())
            values["budget"] = None if layer.budget is None else torch.tensor(layer.budget, dtype=torch.int32)
            own = None if layer.prompt is None else cache.ranks.mine(layer.prompt)
            values["prompt"] = None if own is None else torch.tensor(own, dtype=torch.int32)
            fact = dict(kind=families.FULL_ATTENTION, columns=sequence.columns)
            packed_as = dict(bits=[WORDS[kind] for kind in slots.kinds])
            facts.append(fact if slots.kinds == KINDS["model"] else fact | packed_as)
        elif getattr(layer, "is_sliding", False) and layer.is_initialized:
            window = layer.sliding_window  # type: ignore[attr-defined]
            start = max(0, layer.keys.shape[2] - window + 1)  # longer while the past is recorded
            values = {name: getattr(layer, name)[:, :, start:] for name in ("keys", "values")}
            facts.append(dict(kind=families.SLIDING, columns=layer.cumulative_length, window=window))
        else:
            raise ValueError(f"layer {index}, a {layer!r}, was not filled by kvevict; read with a patched model first")
        tensors |= {f"{index}.{name}": t.contiguous().clone() for name, t in values.items() if t is not None}
    following = None if sequence.next_position is None else sequence.next_position.tolist()
    common: dict[str, Any] = dict(packed=sequence.packed, next_position=following, kvevict=VERSION)
    weights, configuration = cache.owner.identity() or (None, None)
    common |= dict(weights=weights, configuration=configuration, policy=_text_of(sequence.policy))
    ranks, failed = cache.ranks, None
    parts = ranks.to_first(tensors)
    if parts is not None:
        try:
            all_heads = tensors if len(parts) == 1 else _joined(parts)
            for index, fact in enumerate(facts):
                if fact["kind"] == families.FULL_ATTENTION:
                    fact |= _positions_fact(index, all_heads, max([cache.get_seq_length(), *(following or ())]))
            try:
                _check(all_heads, facts, common)
            except (LookupError, ValueError, TypeError, RuntimeError) as error:
                raise ValueError(f"this cache cannot be saved, no file of it could be loaded: {error}") from None
            metadata = {"format": FORMAT, "layers": json.dumps(facts), "cache": json.dumps(common), "name": name}
            sealed.write(path, all_heads, metadata)
        except Exception as error:
            failed = error
    failed = ranks.objects(failed)[0]  # the file is there, or every rank raises
    if failed is not None:
        raise failed


def _moments(layer: EvictionLayer, index: int) -> Any:
    """The one memory of a quantity that a file has room for."""
    others = sorted(layer.memory.keys() - {"moments"})
    if others:
        raise ValueError(
            f"layer {index} remembers {', '.join(others)} for a quantity, which save_cache cannot write; keep the "
            "cache in memory"
        )
    return layer.memory.get("moments")


def _positions_fact(index: int, tensors: dict, end: int) -> dict:
    """The file's facts about a layer's positions. `end`: all positions are below it; it is at least the argument `end`.
    `ties`: positions may repeat within a head, as those of a picture's tokens."""
    pos = tensors[f"{index}.pos"]
    steps = _steps(pos, tensors[f"{index}.len"])
    if bool((steps < 0).any()) or bool((pos < 0).any()):
        raise ValueError(f"layer {index} has positions that do not ascend; read with ascending position_ids to save")
    return dict(end=max(end, int(pos.max()) + 1 if pos.numel() else 0), ties=bool((steps == 0).any()))


def _steps(pos: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    """How much further each slot of a head is than the one before it."""
    ends = length.flatten().cumsum(0)
    within = torch.ones(max(0, len(pos) - 1), dtype=torch.bool, device=pos.device)
    within[ends[(ends > 0) & (ends < len(pos))] - 1] = False
    return pos.long().diff()[within]


def _joined(parts: Any) -> dict:
    """The tensors of a whole cache, out of those of every rank."""
    whole = {}
    for name in parts[0]:
        index, kind = name.split(".", 1)
        each = [part[name].cpu() for part in parts]
        if kind in FLAT:  # a head's slots follow the previous head's, row by row
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


def _part(tensors: dict, ranks: Any) -> dict:
    """This rank's part of a layer's tensors."""
    if ranks.size == 1:
        return tensors
    part = {n: t if n in (*FLAT, *OF_ROWS) else ranks.mine(t).contiguous() for n, t in tensors.items()}
    if "len" in tensors:
        batch, heads = tensors["len"].shape
        of_head = torch.arange(batch * heads).view(batch, heads)
        for name in FLAT:
            rows = tensors[name].split(tensors["len"].flatten().tolist())
            part[name] = torch.cat([rows[i] for i in ranks.mine(of_head).flatten().tolist()])
    if "carry" in part:
        part["carry"] = part["carry"][..., : int(part["len"].max())]
    return part


def _text_of(policy: Policy) -> Any:
    """A policy as JSON; None if it is unknown or JSON cannot hold it."""
    try:
        if policy is not None and policy.recall:
            policy = replace(policy, recall=True)  # a folder is this machine's
        return None if policy is None else policy.to_json()
    except ValueError:
        return None


def _policy_of(text: str) -> Any:
    """The policy that `_text_of` wrote; None for None, and where a part of it is not registered here."""
    if not isinstance(text, (str, type(None))):
        raise TypeError(f"policy is {text!r}, not a text")
    try:
        return None if text is None else Policy.from_json(text)
    except ValueError:
        return None


def _identity_of(common: dict) -> Identity | None:
    """Which model's cache a file has; None: the file does not say."""
    weights, configuration = common["weights"], common["configuration"]
    if configuration is None:
        return None
    if not isinstance(configuration, dict):
        raise TypeError(f"configuration is {configuration!r}, not a model's fields")
    return Identity(weights, configuration)


def load_cache(path: str | os.PathLike, model: Any, *, verify: bool = True, mapped: bool = False) -> EvictionCache:
    """Read a cache written by `save_cache` for use with the same (patched) model: a `DynamicCache`.

    verify   whether to compare the file's checksum with its content; takes a second per GB
    mapped   whether keys and values of a model on the CPU stay in the file, which is mapped into memory: with
             verify=False none is read before it is needed. The file may then be replaced or deleted; if it is written
             to or cut short in place, slots change, or the process ends

    Pass it as `past_key_values`, with either the full history of ids or the new ids alone and an `attention_mask` that
    covers `cache.get_seq_length()` seen tokens and the new ones. Raises ValueError for a file that is damaged, foreign,
    of another version, or of another model, and OSError for one that cannot be read. Two models are the same if their
    weights have the same fingerprint (where both are known) and their configurations have the same fields, but for
    those that change no number a model computes (`kvevict.weights.SILENT`). The file may be deleted afterwards: the
    cache has copies, unless it is mapped.
    """
    from .patch import base_model, find_decoder

    decoder = find_decoder(model)
    config, path = decoder.config, os.fsdecode(path)
    try:
        meta = sealed.texts(path)
        facts, common = parsed(meta.get("layers", "null")), parsed(meta.get("cache", "null"))
    except ValueError as error:
        raise ValueError(f"{path} is not a cache file ({error}); write it again with kvevict.save_cache") from None
    if not str(meta.get("format")).startswith(FORMAT.rstrip("0123456789")) or not isinstance(facts, list):
        raise ValueError(f"{path} is not a cache written by kvevict.save_cache (format {meta.get('format')!r})")
    if meta["format"] != FORMAT:
        raise ValueError(
            f"{path} was written by another version of kvevict: its format is {meta['format']!r}, kvevict {VERSION} "
            f"reads {FORMAT!r}; read the prompt again and save the cache anew"
        )
    try:
        tensors = sealed.tensors(path, verify, mapped=(".k", ".v") if mapped else ())
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} is damaged: {error}; read the prompt again and save the cache anew") from None
    kinds = families.layer_kinds(config)
    if [isinstance(fact, dict) and fact.get("kind") for fact in facts] != kinds:
        raise ValueError(
            f"{path} was written for another model: its layers are not those of {type(decoder).__name__}; give "
            "the one that read it"
        )
    ranks = of(base_model(model))
    try:
        known = _identity_of(common)
    except (LookupError, ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    differs = known and known.difference(identity(decoder))
    if differs:
        raise ValueError(
            f"{path} was written for another model: {differs}; give the one that read it, with the same PEFT adapters "
            "on, or read the prompt again"
        )
    try:
        _check(tensors, facts, common)
    except (LookupError, ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    cache: Any = DynamicCache(config=config)
    dtype = base_model(model).dtype
    adopt(cache, kinds, config, ranks)
    heads = tuple(n // ranks.size for n in families.heads(decoder, kinds))
    heads = (heads[0], 1) if families.is_latent(config) else heads
    for index, (layer, fact) in enumerate(zip(cache.layers, facts, strict=True)):
        if fact["kind"] == families.NOTHING:
            continue
        module = families.attention_of(families.layers_of(decoder)[index], index)
        device, shape = families.device_of(module), (*heads, *families.widths(module, config))
        if isinstance(layer, LatentLayer):
            layer.widths = module.kv_lora_rank, module.qk_rope_head_dim
        whole = _of_layer(tensors, index)
        try:
            mine = {name: t.to(device) for name, t in _part(whole, ranks).items()}
            fill = _fill_evicted if fact["kind"] == families.FULL_ATTENTION else _fill_sliding
            fill(layer, mine, fact, shape, dtype)
            if ranks.size > 1 and "len" in whole:
                ranks.note(layer, np.array(whole["len"].tolist()))
                layer.prompt = np.array(whole["prompt"].tolist()) if "prompt" in whole else None
        except (LookupError, ValueError, TypeError, RuntimeError) as error:
            raise ValueError(f"{path}, layer {index}: {error}; the file is damaged or of another model") from None
    try:
        _fill_cache(cache, common)
    except (LookupError, ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    cache.owner = Owner(decoder, known)
    return cache


def _expect(name: str, tensor: torch.Tensor, shape: tuple, dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype:
        raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}, expected {dtype} {list(shape)}")


def _expect_rows(name: str, tensor: torch.Tensor, rows: int, dim: int, dtype: Any, kind: int) -> None:
    """`_expect` for rows of `dim` numbers."""
    width, element = (dim, dtype) if kind == MODEL else (row_bytes(kind, dim, 0), torch.uint8)
    _expect(name, tensor, (rows, width), element)


def _of_layer(tensors: dict, index: int) -> dict:
    """The tensors of a layer, by name."""
    own = f"{index}."
    return {name.removeprefix(own): t for name, t in tensors.items() if name.startswith(own)}


def _check(tensors: Any, facts: list, common: dict) -> None:
    """Raise ValueError, LookupError, TypeError or RuntimeError where parts of a file contradict each other. Such a file
    is neither written nor read."""
    columns, batches, end = count("columns", facts[0].get("columns"), 0), set(), 0
    if any(fact.get("columns") != columns for fact in facts):
        raise ValueError("its layers disagree on the number of tokens seen")
    for index, fact in enumerate(facts):
        if fact["kind"] == families.NOTHING:
            continue
        check = _check_evicted if fact["kind"] == families.FULL_ATTENTION else _check_sliding
        try:
            batches.add(check(_of_layer(tensors, index), fact))
        except (LookupError, ValueError, TypeError, RuntimeError) as error:
            raise ValueError(f"layer {index}: {error}") from None
        end = max(end, fact.get("end", 0))
    if len(batches) > 1:
        raise ValueError(f"its layers have batches of {sorted(batches)} rows")
    for start, stop in common["packed"]:
        count("packed columns", start, 0)
        if not start < count("packed columns", stop, 0) <= columns:
            raise ValueError(f"packed columns {start} to {stop} were not read")
    following, batch = common["next_position"], batches.pop()
    if following is not None:
        if len(following) != batch:
            raise ValueError(f"next_position has {len(following)} rows, the layers {batch}")
        for position in following:
            if count("next_position", position, 0) > end:
                raise ValueError(f"next_position is {position}, of positions below {end}")


def _check_sliding(tensors: dict, fact: dict) -> int:
    """`_check` of a sliding layer; how many rows it has."""
    keys, length = tensors["keys"], min(fact["columns"], count("window", fact["window"], 1) - 1)
    _expect("keys", keys, (*keys.shape[:2], length, *keys.shape[3:]), keys.dtype)
    _expect("values", tensors["values"], keys.shape, keys.dtype)
    return keys.shape[0]


def _check_evicted(tensors: dict, fact: dict) -> int:
    """`_check` of a layer that is evicted from; how many rows it has."""
    length, arrays, kinds = tensors["len"], [tensors["k"], tensors["v"]], _kinds_of(fact)
    batch, heads = length.shape if length.ndim == 2 else (0, 0)
    rows = int(length.sum())
    plain = next((each for each, kind in zip(arrays, kinds) if kind == MODEL), None)
    dtype, dim = (None, 0) if plain is None else (plain.dtype, plain.shape[-1])
    if kinds[0] != MODEL:
        dim = tensors["centre"].shape[-1]
        _expect("centre", tensors["centre"], (batch, heads, dim), torch.float32)
    for name, each, of_rows in zip("kv", arrays, kinds, strict=True):
        _expect_rows(name, each, rows, dim, dtype, of_rows)
    for name, shape, kind in (
        ("len", (batch, heads), torch.int32), ("pos", (rows,), torch.int32),
        ("seen", (batch,), torch.int32), ("budget", (batch,), torch.int32),
    ):  # fmt: skip
        _expect(name, tensors[name], shape, kind)
    seen, columns = tensors["seen"], fact["columns"]
    if bool((length < 0).any() or (length > seen[:, None]).any() or (seen > columns).any()):
        raise ValueError("more slots than tokens, or more tokens than columns")
    end, pos, steps = count("end", fact["end"], columns), tensors["pos"], _steps(tensors["pos"], length)
    if bool(((pos < 0) | (pos >= end)).any()):
        raise ValueError(f"pos has positions that are not in 0 .. {end - 1}")
    if bool((steps < (0 if fact["ties"] is True else 1)).any()):
        raise ValueError("pos has positions of a head that do not ascend")
    if "carry" in tensors:
        _expect("carry", tensors["carry"], (batch, heads, int(length.max())), torch.float32)
    if "prompt" in tensors:
        _expect("prompt", tensors["prompt"], (batch, heads), torch.int32)
        if bool(((tensors["prompt"] < 0) | (tensors["prompt"] > length)).any()):
            raise ValueError("prompt counts more slots than there are")
    return batch


def _kinds_of(fact: dict) -> tuple:
    """Kinds of a layer's keys and values."""
    words = fact.get("bits", [None, None])
    if not isinstance(words, (list, tuple)) or len(words) != 2 or not all(each in WORDS for each in words):
        raise ValueError(f"slots of {words!r} bits, which this version of kvevict does not know")
    return tuple(WORDS.index(each) for each in words)


def _fill_cache(cache: EvictionCache, fact: dict) -> None:
    """Set the parts of a cache that concern all layers."""
    sequence = cache.sequence
    sequence.policy, sequence.packed = _policy_of(fact["policy"]), tuple(map(tuple, fact["packed"]))
    sequence.floor = sequence.columns
    if fact["next_position"] is not None:
        first = next(layer for layer in cache.layers if isinstance(layer, EvictionLayer))
        sequence.next_position = torch.tensor(fact["next_position"], dtype=torch.int64, device=first.device)


def _fill_sliding(layer: Any, tensors: dict, fact: dict, shape: tuple, dtype: torch.dtype) -> None:
    """A sliding layer may have another number of heads than the layers that evict."""
    if fact["window"] != layer.sliding_window:
        raise ValueError(f"sliding window {fact['window']}, the model's is {layer.sliding_window}")
    keys, values = tensors["keys"], tensors["values"]
    _expect("keys", keys, (*keys.shape[:3], shape[2]), dtype)
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values, layer.cumulative_length = keys, values, fact["columns"]


def _fill_evicted(layer: EvictionLayer, tensors: dict, fact: dict, shape: tuple, dtype: torch.dtype) -> None:
    (query_heads, heads, dim, read), length = shape, tensors["len"]
    batch = len(length)
    _expect("len", length, (batch, heads), torch.int32)
    kinds, rows = _kinds_of(fact), int(length.sum())
    for name, kind in zip("kv", kinds, strict=True):
        _expect_rows(name, tensors[name], rows, dim, dtype, kind)
    if "prompt" in tensors:
        layer.prompt = np.array(tensors["prompt"].tolist())
    if "moments" in tensors:
        _expect("moments", tensors["moments"], (batch, query_heads, 1 + read, 1 + read), torch.float32)
    if "decode_queries" in tensors:
        *_, rows, width = tensors["decode_queries"].shape  # queries, or queries and outputs
        _expect("decode_queries", tensors["decode_queries"], (batch, query_heads, rows, max(read, width)), dtype)
        if width not in (read, 2 * read):
            raise ValueError(f"decode_queries has {width} columns, expected {read} or {2 * read}")
    layer.lazy_initialization(tensors["k"].new_empty(batch, heads, 0, dim, dtype=dtype))
    slots, counts = (tensors["k"], tensors["v"], tensors["pos"]), np.array(length.tolist())
    layer.kinds = kinds
    layer.storage = Storage.packed(*slots, counts, layer.storage.like, tensors.get("centre"), kinds)
    layer.sequence.columns, layer.sequence.seen = fact["columns"], np.array(tensors["seen"].tolist())
    layer.budget = np.array(tensors["budget"].tolist())
    for name in OPTIONAL:
        setattr(layer, name, tensors.get(name))
    layer.memory = {"moments": tensors["moments"]} if "moments" in tensors else {}
    layer.carry = of_layer(layer.carry, layer)
