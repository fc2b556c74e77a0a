"""Loads a cache from a file. Its slots may stay in the file, mapped into memory."""

import contextlib
import os
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from transformers.cache_utils import DynamicCache

from ..engine.memory import host
from ..engine.memory.cache import EvictionCache, adopt
from ..engine.memory.carried import of_layer as carried_of
from ..engine.memory.latent import LatentLayer
from ..engine.memory.layer import EvictionLayer
from ..engine.memory.mapped import Lent
from ..engine.memory.ranks import Ranks, of
from ..engine.memory.storage import Storage
from ..models import families
from ..models.owner import Owner
from ..models.weights import Identity, identity
from ..policy.checks import parsed
from ..policy.kv import KINDS
from ..policy.policy import Policy
from ..policy.run import Run
from ..version import VERSION
from . import sealed
from .files import is_remote
from .form import ANY, FLAT, FORMAT, OF_ROWS, OPTIONAL, WRONG, check, expect, expect_rows, kinds_of, of_layer, policy_of


def load_cache(path: str | os.PathLike, model: Module, *, verify: bool = True) -> EvictionCache:
    """Load a cache that `save_cache` wrote, as a `DynamicCache` for the patched model that read its tokens.

    path    the file
    model   the model that read the cache's tokens, patched
    verify  whether to compare the file's checksum with its content, which reads all of the file: a second per GB

    If the cache was read with recall=True, its slots stay in the file, unless the file is on a network file system:
    pages are read when they are needed, do not count as the process's memory, and are shared by all processes. A layer
    on a GPU gets its slots when it attends. The file may be replaced or deleted meanwhile, but must not be changed in
    place. Any other cache is copied into memory.

    Pass the cache as `past_key_values`, with either the full history of ids, or the new ids and an `attention_mask`
    that covers `cache.get_seq_length()` seen tokens and the new ones.

    Raises OSError for a file that cannot be read, and ValueError for a file that is damaged, was not written by
    `save_cache`, has another version's format, or belongs to another model. Models differ if their weights have
    different fingerprints, when both fingerprints are known, or if their configurations differ in a field that changes
    a computed number (one that is not in `kvevict.models.weights.SILENT`).
    """
    decoder, base, path = families.find_decoder(model), families.base_model(model), os.fsdecode(path)
    tensors, facts, common = _contents(path, verify, decoder)
    with _impossible(f"{path} is damaged"):
        check(tensors, facts, common)
        configuration = common["configuration"]
        known = None if configuration is None else Identity(common["weights"], dict(configuration))
        policy, run = _policy_of(common, path)
    differs = known and known.difference(identity(decoder))
    if differs:
        raise ValueError(
            f"{path} was written for another model: {differs}; give the one that read it, with the same PEFT adapters "
            "on, or read the prompt again"
        )
    cache: Any = DynamicCache(config=decoder.config)
    adopt(cache, families.layer_kinds(decoder.config), decoder.config, of(base))
    recalls = policy is not None and policy.recall
    for index, fact in enumerate(facts):
        if fact["kind"] != families.NOTHING:
            with _impossible(f"{path}, layer {index}", "; the file is damaged or of another model"):
                stay = path if cache.ranks.size == 1 and stays(path, policy) else ""
                _fill_layer(cache, index, decoder, of_layer(tensors, index), fact, base.dtype, stay, recalls)
    with _impossible(f"{path} is damaged"):
        _fill_cache(cache, common, policy, run)
    cache.owner = Owner(decoder, known)
    return cache


def _contents(path: str, verify: bool, decoder: Module) -> tuple[dict[str, Tensor], list[dict], dict[str, Any]]:
    """Return (tensors of a file, facts of each layer, facts of the whole cache). Raises ValueError for a file that is
    not a cache file, is damaged, or has other kinds of layers than the decoder."""
    try:
        texts = sealed.texts(path)
        facts, common = parsed(texts.get("layers", "null")), parsed(texts.get("cache", "null"))
    except ValueError as error:
        raise ValueError(f"{path} is not a cache file ({error}); write it again with kvevict.save_cache") from None
    if not str(texts.get("format")).startswith(ANY) or not isinstance(facts, list):
        raise ValueError(f"{path} is not a cache written by kvevict.save_cache (format {texts.get('format')!r})")
    if texts["format"] != FORMAT:
        raise ValueError(
            f"{path} was written by another version of kvevict: its format is {texts['format']!r}, kvevict {VERSION} "
            f"reads {FORMAT!r}; read the prompt again and save the cache anew"
        )
    try:
        tensors = sealed.tensors(path, verify)
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} is damaged: {error}; read the prompt again and save the cache anew") from None
    if [isinstance(fact, dict) and fact.get("kind") for fact in facts] != families.layer_kinds(decoder.config):
        raise ValueError(
            f"{path} was written for another model: its layers are not those of {type(decoder).__name__}; give "
            "the one that read it"
        )
    return tensors, facts, common


@contextlib.contextmanager
def _impossible(what: str, advice: str = "") -> Iterator[None]:
    """Turn an error that a file's impossible content causes in the block into a ValueError: `what`, then the error's
    message, then `advice`."""
    try:
        yield
    except WRONG as error:
        raise ValueError(f"{what}: {error}{advice}") from None


def _fill_layer(
    cache: Any, index: int, decoder: Module, whole: dict[str, Tensor], fact: dict, dtype: torch.dtype, stay: str,
    recalls: bool,
) -> None:  # fmt: skip
    """Fill layer `index` of a cache with the content of a file.

    whole    the layer's tensors in the file, with the heads of all tensor-parallel ranks
    fact     the layer's facts in the file
    dtype    the model's dtype
    stay     the file, if the slots stay there; else ""
    recalls  whether the file has the slots of all tokens, which stay in the host's memory if the layer is on a GPU
    """
    layer, ranks, config = cache.layers[index], cache.ranks, decoder.config
    module = families.attention_of(families.layers_of(decoder)[index], index)
    device, heads = families.device_of(module), families.heads(config)
    kv_heads = 1 if families.is_latent(config) else heads[1] // ranks.size
    shape = heads[0] // ranks.size, kv_heads, *families.widths(module, config)
    if isinstance(layer, LatentLayer):
        layer.widths = module.kv_lora_rank, module.qk_rope_head_dim
    away = recalls and host.is_away(device)
    mine = _part(whole, ranks)
    for name, tensor in mine.items():
        if name not in FLAT or not stay:
            mine[name] = tensor.to("cpu" if name in FLAT and away else device, copy=True)
    fill = _fill_evicted if fact["kind"] == families.FULL_ATTENTION else _fill_sliding
    fill(layer, mine, fact, shape, dtype)
    if isinstance(layer, EvictionLayer) and (stay or away):
        layer.hold(_before(layer.storage, stay, device if away else None))
    if ranks.size > 1 and "len" in whole:
        ranks.note(layer, np.array(whole["len"].tolist()))
        layer.prompt = np.array(whole["prompt"].tolist()) if "prompt" in whole else None


def stays(path: str | os.PathLike, policy: Policy | None) -> bool:
    """Return whether `load_cache` leaves a cache's slots in the file `path`. It does if `policy`, with which the cache
    was read, recalls, and if the file is not on a network file system: another machine could remove the file there, and
    the next access to a page would end the process."""
    return policy is not None and policy.recall and not is_remote(path)


def _before(slots: Storage, file: str, device: torch.device | None) -> Storage:
    """Return an empty storage whose prefix is the loaded slots; slots of later tokens go behind the prefix.

    file    the file, if the loaded slots stay there; else ""
    device  the layer's device if the loaded slots stay in the host's memory; None: they are on the layer's device
    """
    if file:
        lent = Lent(slots.buffers, len(slots.pos), file)
        slots = replace(slots, regions=(lent,) * len(slots.counts))
    if device is None:
        return slots.as_prefix()
    centre = None if slots.centre is None else slots.centre.cpu()
    there = replace(slots, like=slots.like.cpu(), centre=centre, on_host=True)
    return there.blank_on(device, False, prefix=there)


def _part(tensors: dict[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """Return a layer's tensors with the heads of this tensor-parallel rank alone. tensors: with the heads of all."""
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


def _policy_of(common: dict, path: str) -> tuple[Policy | None, Run]:
    """Return (policy, run) from the facts of a file's cache. If this process cannot build the policy, for example
    because one of its parts is not registered, warn and return (None, Run()): the slots can be used without a
    policy."""
    if not isinstance(common["policy"], (str, type(None))):
        raise TypeError(f"policy is {common['policy']!r}, not a text")
    try:
        return (None, Run()) if common["policy"] is None else policy_of(common)
    except ValueError as error:
        warnings.warn(
            f"{path} was read with a policy that cannot be used here ({error}): answers attend to all slots in the "
            "file, and none recalls; import the module that registers the policy's own parts before "
            "kvevict.load_cache, or read the text again with a policy that is known",
            stacklevel=3,
        )
        return None, Run()


def _fill_cache(cache: EvictionCache, fact: dict, policy: Policy | None, run: Run) -> None:
    """Set the state that all layers of a cache share. fact: the facts of the file's cache."""
    sequence = cache.sequence
    sequence.policy, sequence.run, sequence.packed = policy, run, tuple(map(tuple, fact["packed"]))
    sequence.floor = sequence.columns
    for layer in cache.layers:
        if isinstance(layer, EvictionLayer) and run.archive_kv is not None:
            layer.kinds = KINDS[run.kv]  # for slots chosen later; the slots in the file have the archive's kinds
    if fact["next_position"] is not None:
        first = next(layer for layer in cache.layers if isinstance(layer, EvictionLayer))
        sequence.next_position = torch.tensor(fact["next_position"], dtype=torch.int64, device=first.device)


def _fill_sliding(layer: Any, tensors: dict, fact: dict, shape: tuple, dtype: torch.dtype) -> None:
    """Fill a layer that has a sliding window. Its number of heads may differ from that of the layers that evict."""
    if fact["window"] != layer.sliding_window:
        raise ValueError(f"sliding window {fact['window']}, the model's is {layer.sliding_window}")
    keys, values = tensors["keys"], tensors["values"]
    expect("keys", keys, (*keys.shape[:3], shape[2]), dtype)
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values, layer.cumulative_length = keys, values, fact["columns"]


def _fill_evicted(layer: EvictionLayer, tensors: dict, fact: dict, shape: tuple, dtype: torch.dtype) -> None:
    (query_heads, heads, dim, read), length = shape, tensors["len"]
    batch = len(length)
    expect("len", length, (batch, heads), torch.int32)
    kinds, rows = kinds_of(fact), int(length.sum())
    for name, kind in zip("kv", kinds, strict=True):
        expect_rows(name, tensors[name], rows, dim, dtype, kind)
    if "prompt" in tensors:
        layer.prompt = np.array(tensors["prompt"].tolist())
    if "moments" in tensors:
        expect("moments", tensors["moments"], (batch, query_heads, 1 + read, 1 + read), torch.float32)
    if "decode_queries" in tensors:
        *_, rows, width = tensors["decode_queries"].shape  # a row is a query, or a query and its output
        expect("decode_queries", tensors["decode_queries"], (batch, query_heads, rows, max(read, width)), dtype)
        if width not in (read, 2 * read):
            raise ValueError(f"decode_queries has {width} columns, expected {read} or {2 * read}")
    layer.lazy_initialization(length.new_empty(batch, heads, 0, dim, dtype=dtype))
    slots, counts = (tensors["k"], tensors["v"], tensors["pos"]), np.array(length.tolist())
    layer.kinds = kinds
    layer.hold(Storage.packed(*slots, counts, layer.storage.like, tensors.get("centre"), kinds))
    layer.sequence.columns, layer.sequence.seen = fact["columns"], np.array(tensors["seen"].tolist())
    layer.budget = np.array(tensors["budget"].tolist())
    for name in OPTIONAL:
        setattr(layer, name, tensors.get(name))
    layer.memory = {"moments": tensors["moments"]} if "moments" in tensors else {}
    layer.carry = carried_of(layer.carry, layer)
