"""Save and load a compressed cache: a prompt is read once, questions are asked later."""

import json
import os

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers.cache_utils import CacheLayerMixin, DynamicCache

from . import families
from .engine import host
from .engine.adopt import StatefulLayer, adopt
from .engine.cache import EvictionLayer
from .engine.latent import LatentLayer

FORMAT = "kvevict-cache-2"
OWN_TENSORS = ("k", "v", "pos", "len", "seen")
OPTIONAL = ("carry", "recent")


def save_cache(cache, path) -> None:
    """Write a cache that a patched model filled to `path` (safetensors).

    cache   `past_key_values` of a patched model's output. Raises ValueError when kvevict did not fill it.
    """
    if not getattr(cache, "layers", None):
        raise ValueError("the cache was not filled by kvevict: it is empty; read a prompt with a patched model first")
    tensors, facts = {}, []
    for index, layer in enumerate(cache.layers):
        if type(layer).__name__ == "DummyLayer":
            facts.append(dict(kind=families.NOTHING, columns=cache.get_seq_length()))
            continue
        if isinstance(layer, StatefulLayer) or not isinstance(layer, CacheLayerMixin):
            raise ValueError(f"layer {index} keeps a state, which save_cache does not write")
        if isinstance(layer, EvictionLayer) and layer.is_initialized:
            packed = torch.cat([torch.arange(s.start, s.stop) for _, _, s in layer.segments()])
            values: dict = dict(k=layer.k[packed], v=layer.v[packed], pos=layer.pos[packed])
            values |= {name: getattr(layer, name) for name in ("len", "seen", *OPTIONAL)}
            values["budget"] = None if layer.budget is None else torch.tensor(layer.budget, dtype=torch.int32)
            facts.append(dict(kind=families.OWN, columns=layer.columns))
        elif getattr(layer, "is_sliding", False) and layer.is_initialized:
            window = layer.sliding_window  # type: ignore[attr-defined]
            start = max(0, layer.keys.shape[2] - window + 1)  # longer while the past is recorded
            values = {name: getattr(layer, name)[:, :, start:] for name in ("keys", "values")}
            facts.append(dict(kind=families.SLIDING, columns=layer.cumulative_length, window=window))
        else:
            raise ValueError(f"layer {index}, a {layer!r}, was not filled by kvevict; read with a patched model first")
        tensors |= {f"{index}.{name}": t.contiguous().clone() for name, t in values.items() if t is not None}
    temporary = f"{os.fspath(path)}.part"
    save_file(tensors, temporary, metadata={"format": FORMAT, "layers": json.dumps(facts)})
    os.replace(temporary, path)


def load_cache(path, model):
    """Read a cache written by `save_cache` for use with the same (patched) model: a `DynamicCache`.

    Pass it as `past_key_values`, with either the full history of ids or the new ids alone and an `attention_mask` that
    covers `cache.get_seq_length()` seen tokens and the new ones. Raises ValueError for a file that is damaged, foreign,
    or of another model.
    """
    from .patch import base_model, find_decoder

    decoder = find_decoder(model)
    config = decoder.config
    try:
        with safe_open(path, framework="pt") as file:
            meta = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        facts = json.loads(meta.get("layers", "null"))
    except (SafetensorError, json.JSONDecodeError, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise ValueError(f"{path} is no cache file ({error}); write it again with kvevict.save_cache") from None
    if meta.get("format") != FORMAT or not isinstance(facts, list):
        raise ValueError(f"{path} is not a cache written by kvevict.save_cache (format {meta.get('format')!r})")
    kinds = families.layer_kinds(config)
    if [isinstance(fact, dict) and fact.get("kind") for fact in facts] != kinds:
        raise ValueError(f"{path} was written for another model: its layers are not those of {type(decoder).__name__}")
    columns = facts[0].get("columns")
    if type(columns) is not int or columns < 0 or any(fact.get("columns") != columns for fact in facts):
        raise ValueError(f"{path} is damaged: its layers disagree on the number of tokens seen")
    cache = DynamicCache(config=config)
    adopt(cache, kinds, config)
    heads, dtype = families.heads(decoder, kinds), base_model(model).dtype
    heads = (heads[0], 1) if families.is_latent(config) else heads
    for index, (layer, fact) in enumerate(zip(cache.layers, facts, strict=True)):
        if fact["kind"] == families.NOTHING:
            continue
        module = families.attention_of(families.layers_of(decoder)[index], index)
        device, shape = families.device_of(module), (*heads, *families.widths(module, config))
        if isinstance(layer, LatentLayer):
            layer.widths = module.kv_lora_rank, module.qk_rope_head_dim
        mine = {n.split(".", 1)[1]: t.to(device) for n, t in tensors.items() if n.split(".", 1)[0] == str(index)}
        try:
            fill = _fill_own if fact["kind"] == families.OWN else _fill_sliding
            fill(layer, mine, fact, shape, dtype)
        except (KeyError, ValueError, RuntimeError, TypeError) as error:
            raise ValueError(f"{path}, layer {index}: {error}; the file is damaged or of another model") from None
    batches = {
        layer.len.shape[0] if isinstance(layer, EvictionLayer) else layer.keys.shape[0]
        for layer, kind in zip(cache.layers, kinds, strict=True)
        if kind != families.NOTHING
    }
    if len(batches) > 1:
        raise ValueError(f"{path} is damaged: its layers have batches of {sorted(batches)} rows")
    return cache


def _expect(name, tensor, shape, dtype):
    if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype:
        raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}, expected {dtype} {list(shape)}")


def _fill_sliding(layer, tensors, fact, shape, dtype):
    """Its heads may be others than those of the layers that evict."""
    if fact["window"] != layer.sliding_window:
        raise ValueError(f"sliding window {fact['window']}, the model's is {layer.sliding_window}")
    keys, values = tensors["keys"], tensors["values"]
    length = min(fact["columns"], layer.sliding_window - 1)
    for name, tensor in (("keys", keys), ("values", values)):
        _expect(name, tensor, (*keys.shape[:2], length, shape[2]), dtype)
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values, layer.cumulative_length = keys, values, fact["columns"]


def _fill_own(layer, tensors, fact, shape, dtype):
    (query_heads, heads, dim, read), length = shape, tensors["len"]
    batch = length.shape[0]
    _expect("len", length, (batch, heads), torch.int32)
    rows = int(length.sum())
    for name, shape, kind in (
        ("k", (rows, dim), dtype), ("v", (rows, dim), dtype), ("pos", (rows,), torch.int32),
        ("seen", (batch,), torch.int32), ("budget", (batch,), torch.int32),
    ):  # fmt: skip
        _expect(name, tensors[name], shape, kind)
    seen, columns = tensors["seen"], fact["columns"]
    if bool((length < 0).any() or (length > seen[:, None]).any() or (seen > columns).any()):
        raise ValueError("more slots than tokens, or more tokens than columns")
    if "carry" in tensors:
        _expect("carry", tensors["carry"], (batch, heads, int(length.max())), torch.float32)
    if "recent" in tensors:
        *_, rows, width = tensors["recent"].shape  # queries, or queries and outputs
        _expect("recent", tensors["recent"], (batch, query_heads, rows, max(read, width)), dtype)
        if width not in (read, 2 * read):
            raise ValueError(f"recent has {width} columns, expected {read} or {2 * read}")
    layer.lazy_initialization(tensors["k"].new_empty(batch, heads, 0, dim))
    layer.counts = layer.capacity = np.array(length.tolist())
    layer.offset, layer.columns = host.upload(layer._offsets(), length.device), columns
    for name in OWN_TENSORS:
        setattr(layer, name, tensors[name])
    layer.budget = np.array(tensors["budget"].tolist())
    layer.carry, layer.recent = tensors.get("carry"), tensors.get("recent")
