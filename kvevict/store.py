"""Save and load a compressed cache: a prompt is read once, questions are asked later."""

import json
import os

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers.cache_utils import DynamicCache

from . import compat
from .cache import EvictionLayer, adopt

FORMAT = "kvevict-cache-1"
OWN_TENSORS = ("k", "v", "pos", "len", "seen", "budget")
OPTIONAL = ("carry", "recent")
SLIDING_TENSORS = ("keys", "values")


def save_cache(cache, path) -> None:
    """Write a cache that a patched model filled to `path` (safetensors).

    cache   `past_key_values` of a patched model's output. Raises ValueError when kvevict did not fill it.
    """
    tensors, facts = {}, []
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, EvictionLayer) and layer.is_initialized:
            packed = torch.cat([torch.arange(s.start, s.stop) for _, _, s in layer.segments()])
            values = dict(k=layer.k[packed], v=layer.v[packed], pos=layer.pos[packed])
            values |= {name: getattr(layer, name) for name in OWN_TENSORS[3:] + OPTIONAL}
            facts.append(dict(kind=compat.OWN, columns=layer.columns))
        elif getattr(layer, "is_sliding", False) and layer.is_initialized:
            values = dict(keys=layer.keys, values=layer.values)
            facts.append(dict(kind=compat.SLIDING, columns=layer.cumulative_length, window=layer.sliding_window))
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
    kinds = compat.layer_kinds(config)
    if [fact.get("kind") for fact in facts] != kinds:
        raise ValueError(f"{path} was written for another model: its layers are not those of {type(decoder).__name__}")
    cache = DynamicCache(config=config)
    adopt(cache, kinds, config)
    dtype, device = next(base_model(model).parameters()).dtype, next(base_model(model).parameters()).device
    for index, (layer, fact) in enumerate(zip(cache.layers, facts, strict=True)):
        mine = {n.split(".", 1)[1]: t.to(device) for n, t in tensors.items() if n.split(".", 1)[0] == str(index)}
        try:
            _fill(layer, mine, fact, config, dtype, decoder.layers[index].self_attn)
        except (KeyError, ValueError, RuntimeError, TypeError) as error:
            raise ValueError(f"{path}, layer {index}: {error}; the file is damaged or of another model") from None
    return cache


def _fill(layer, tensors, fact, config, dtype, module):
    heads, dim = config.num_key_value_heads, module.head_dim
    if fact["kind"] == compat.SLIDING:
        if fact["window"] != layer.sliding_window:
            raise ValueError(f"sliding window {fact['window']}, the model's is {layer.sliding_window}")
        keys, values = (tensors[name] for name in SLIDING_TENSORS)
        if keys.shape != values.shape or keys.shape[1] != heads or keys.shape[3] != dim or keys.dtype != dtype:
            raise ValueError(f"sliding keys {tuple(keys.shape)} {keys.dtype} do not fit")
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values, layer.cumulative_length = keys, values, int(fact["columns"])
        return
    k, v, pos, length, seen, budget = (tensors[name] for name in OWN_TENSORS)
    rows = int(length.sum())
    if k.dtype != dtype:
        raise ValueError(f"keys are {k.dtype}, the model is {dtype}")
    if k.shape != (rows, dim) or v.shape != k.shape or v.dtype != k.dtype or pos.shape != (rows,):
        raise ValueError(f"keys {tuple(k.shape)} and values {tuple(v.shape)} for {rows} slots of {dim}")
    if length.ndim != 2 or length.shape[1] != heads or bool((length < 0).any()) or seen.shape != length.shape[:1]:
        raise ValueError(f"slot counts of shape {tuple(length.shape)} for {heads} kv heads")
    layer.lazy_initialization(k.new_empty(length.shape[0], heads, 0, dim))
    ends = length.flatten().cumsum(0)
    offset = (ends - length.flatten()).view(length.shape)
    layer.k, layer.v, layer.pos, layer.offset = k, v, pos, offset
    layer.len, layer.capacity = length, length.clone()
    layer.columns, layer.seen, layer.budget = int(fact["columns"]), seen, budget
    layer.carry, layer.recent = tensors.get("carry"), tensors.get("recent")
