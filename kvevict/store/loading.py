"""Loads a cache from a file, whose slots may stay in the file."""

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
    """Load a cache that `save_cache` wrote, for the model that read it, patched: a `DynamicCache`.

    verify  whether to compare the file's checksum with its content, which reads all of the file: a second per GB

    The slots of a cache that was read with recall=True stay in the file, unless it is on a network file system: pages
    are read when they are needed, do not count as the process's memory, and are shared by all processes. A GPU gets a
    layer's slots when the layer attends. The file may be replaced or deleted meanwhile, but must not be changed in
    place. Any other cache is copied into memory.

    Pass the cache as `past_key_values`, with either the full history of ids, or the new ids and an `attention_mask`
    that covers `cache.get_seq_length()` seen tokens and the new ones.

    Raises OSError for a file that cannot be read, and ValueError for one that is damaged, foreign, of another version
    or of another model: one whose weights have another fingerprint, if both are known, or whose configuration differs
    in a field that changes a computed number (not in `kvevict.models.weights.SILENT`).
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
                stay = cache.ranks.size == 1 and stays(path, policy)
                _fill_layer(cache, index, decoder, of_layer(tensors, index), fact, base.dtype, stay, recalls)
    with _impossible(f"{path} is damaged"):
        _fill_cache(cache, common, policy, run)
    cache.owner = Owner(decoder, known)
    return cache


def _contents(path: str, verify: bool, decoder: Module) -> tuple[dict[str, Tensor], list[dict], dict[str, Any]]:
    """Return the tensors of a file, the facts of each layer and those of the cache. Raises ValueError for a file that
    is not a cache's, or whose layers are not the decoder's."""
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
    """Raise ValueError, with `what` and the reason, for a file whose content is impossible."""
    try:
        yield
    except WRONG as error:
        raise ValueError(f"{what}: {error}{advice}") from None


def _fill_layer(
    cache: Any, index: int, decoder: Module, whole: dict[str, Tensor], fact: dict, dtype: torch.dtype, stay: bool,
    recalls: bool,
) -> None:  # fmt: skip
    """Fill a layer of a cache.

    whole    the layer's tensors in the file, with the heads of all ranks
    fact     the layer's facts in the file
    stay     whether the slots stay in the file
    recalls  whether the slots are those of all tokens, which a GPU may leave in the host's memory
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
        layer.storage = _before(layer.storage, stay, device if away else None)
    if ranks.size > 1 and "len" in whole:
        ranks.note(layer, np.array(whole["len"].tolist()))
        layer.prompt = np.array(whole["prompt"].tolist()) if "prompt" in whole else None


def stays(path: str | os.PathLike, policy: Policy | None) -> bool:
    """Return whether `load_cache` leaves the slots in the file of a cache that `policy` read. Not on a network file
    system: if another machine removed the file, the next access to a page would end the process."""
    return policy is not None and policy.recall and not is_remote(path)


def _before(slots: Storage, file: bool, device: torch.device | None) -> Storage:
    """Make loaded slots the prefix of what is read next. file: whether they stay in the file; device: of a layer whose
    slots stay in the host's memory; None: they are on the layer's device."""
    if file:
        lent = Lent(slots.buffers, len(slots.pos))
        slots = replace(slots, regions=(lent,) * len(slots.counts))
    if device is None:
        return slots.as_prefix()
    centre = None if slots.centre is None else slots.centre.cpu()
    there = replace(slots, like=slots.like.cpu(), centre=centre, on_host=True)
    return there.blank_on(device, False, prefix=there)


def _part(tensors: dict[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """Return this rank's heads of a layer's tensors."""
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
    """Return `policy_of` a file; no policy, and a warning, if this process cannot build the policy, for example as one
    of its parts is not registered. The slots can be used without it."""
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
    """Set what all layers of a cache share."""
    sequence = cache.sequence
    sequence.policy, sequence.run, sequence.packed = policy, run, tuple(map(tuple, fact["packed"]))
    sequence.floor = sequence.columns
    for layer in cache.layers:
        if isinstance(layer, EvictionLayer) and run.archive_kv is not None:
            layer.kinds = KINDS[run.kv]  # of the slots that will be chosen; those of the file have the archive's kinds
    if fact["next_position"] is not None:
        first = next(layer for layer in cache.layers if isinstance(layer, EvictionLayer))
        sequence.next_position = torch.tensor(fact["next_position"], dtype=torch.int64, device=first.device)


def _fill_sliding(layer: Any, tensors: dict, fact: dict, shape: tuple, dtype: torch.dtype) -> None:
    """Fill a layer with a sliding window, which may have another number of heads than layers that evict."""
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
        *_, rows, width = tensors["decode_queries"].shape  # a row has a query, or a query and an output
        expect("decode_queries", tensors["decode_queries"], (batch, query_heads, rows, max(read, width)), dtype)
        if width not in (read, 2 * read):
            raise ValueError(f"decode_queries has {width} columns, expected {read} or {2 * read}")
    layer.lazy_initialization(length.new_empty(batch, heads, 0, dim, dtype=dtype))
    slots, counts = (tensors["k"], tensors["v"], tensors["pos"]), np.array(length.tolist())
    layer.kinds = kinds
    layer.storage = Storage.packed(*slots, counts, layer.storage.like, tensors.get("centre"), kinds)
    layer.sequence.columns, layer.sequence.seen = fact["columns"], np.array(tensors["seen"].tolist())
    layer.budget = np.array(tensors["budget"].tolist())
    for name in OPTIONAL:
        setattr(layer, name, tensors.get(name))
    layer.memory = {"moments": tensors["moments"]} if "moments" in tensors else {}
    layer.carry = carried_of(layer.carry, layer)
