"""Finds the parts of a decoder from its structure: its layers, what each layer caches, and the module of each layer
that calls Transformers' attention interface. known.py has facts about model types as a whole."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

FULL_ATTENTION, SLIDING = "full attention", "sliding window"
STATE = "state"  # the layer keeps a state from call to call: linear attention or a convolution
NOTHING = "nothing"  # the layer caches nothing: it is an MLP alone, or reads another layer's keys and values
FULL_ATTENTION_AND_STATE = "full attention and state"
EVICTS = (FULL_ATTENTION, FULL_ATTENTION_AND_STATE)

_KINDS = {  # class name of one of Transformers' cache layers -> what the layer caches
    "DynamicLayer": FULL_ATTENTION, "DynamicSlidingWindowLayer": SLIDING, "LinearAttentionLayer": STATE,
    "DummyLayer": NOTHING, "LinearAttentionAndFullAttentionLayer": FULL_ATTENTION_AND_STATE,
}  # fmt: skip

LAYER_LISTS = ("layers", "h", "blocks")
OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj")  # names of an attention module's output projection
INNER = ("model", "transformer", "gpt_neox", "language_model", "text_model", "decoder")


def unwrapped(model: Any) -> Any:
    """Return the model inside a pipeline or under wrappers (data parallel, torch.compile); a plain model is returned
    unchanged, and so is a PEFT model, since it may put learned tokens before a prompt."""
    if not isinstance(model, torch.nn.Module) and isinstance(getattr(model, "model", None), torch.nn.Module):
        model = model.model
    while isinstance(model, (DataParallel, DistributedDataParallel)) or hasattr(model, "_orig_mod"):
        model = model._orig_mod if hasattr(model, "_orig_mod") else model.module
    return model


def base_model(model: Any) -> Any:
    """Return the Transformers model inside `model`: without the wrappers that `unwrapped` removes, and without PEFT."""
    model = unwrapped(model)
    return unwrapped(model.get_base_model()) if hasattr(model, "get_base_model") else model


def find_decoder(model: Any) -> Any:
    """Return a model's text decoder, the module whose layers cache keys and values. Raises TypeError if `model` is not
    a model, and ValueError if it has no such decoder."""
    top = base_model(model)
    if not isinstance(top, torch.nn.Module) or not hasattr(top, "config"):
        raise TypeError(f"model must be a loaded Transformers model or a pipeline, got {type(model).__name__}")
    decoder = decoder_of(top)
    if decoder is None:
        why = reasons(top.config) or [
            f"model_type {top.config.model_type!r} is not supported (it has no text decoder with `layers`)"
        ]
        raise ValueError(
            f"{type(top).__name__} cannot be patched: {'; '.join(why)}; give a decoder-only Transformers model"
        )
    return decoder


def decoder_of(top: Any) -> Any:
    """Return the submodule of a model that runs its text layers; None if no such submodule is found."""
    module = top.get_decoder() if hasattr(top, "get_decoder") else top
    while module is not None and (layers_of(module) is None or not hasattr(module, "config")):
        inner = (getattr(module, name, None) for name in INNER)
        module = next((each for each in inner if isinstance(each, torch.nn.Module)), None)
    return module


def layers_of(decoder: torch.nn.Module) -> Any:
    """Return the decoder's list of layers; None if it has no list under a known name (`LAYER_LISTS`)."""
    lists = (getattr(decoder, name, None) for name in LAYER_LISTS)
    return next((each for each in lists if isinstance(each, torch.nn.ModuleList)), None)


def evicting(config: Any) -> list[int]:
    """List the indices of the decoder layers that evict."""
    return [index for index, kind in enumerate(layer_kinds(config)) if kind in EVICTS]


def attentions(decoder: Any, layers: Iterable[int]) -> list[Any]:
    """List the attention modules (`attention_of`) of the decoder layers with the indices `layers`."""
    return [attention_of(layers_of(decoder)[index], index) for index in layers]


def attention_of(layer: torch.nn.Module, index: int) -> Any:
    """Return the module of a decoder layer that calls Transformers' attention interface; None if no module or several
    modules do. index: the layer's index."""
    own = (m for m in layer.modules() if getattr(m, "layer_idx", None) == index)
    found = [m for m in own if "ALL_ATTENTION_FUNCTIONS" in _names(type(m).forward)]
    return found[0] if len(found) == 1 else None


def _names(function: Callable) -> tuple:
    """List the names of the globals and attributes that a function's code uses."""
    return getattr(getattr(inspect.unwrap(function), "__code__", None), "co_names", ())


def is_transformers(decoder: torch.nn.Module) -> bool:
    """Whether a decoder and all modules of its layers are instances of classes of Transformers or torch."""
    parts = [decoder, *layers_of(decoder).modules()]
    return all(type(part).__module__.startswith(("transformers.", "torch.")) for part in parts)


def device_of(module: torch.nn.Module) -> torch.device:
    """Return the device on which a module computes. It may differ from its weights' device, as accelerate can store
    weights elsewhere and leave meta tensors in their place."""
    for each in module.modules():
        hook = getattr(each, "_hf_hook", None)
        for one in getattr(hook, "hooks", (hook,)):
            if getattr(one, "execution_device", None) is not None:
                return torch.empty(0, device=one.execution_device).device
    return next(module.parameters(), torch.empty(0)).device  # modules of torch.ao have no parameters: they are on CPUs


def mixer_of(layer: torch.nn.Module) -> Any:
    """Return the module of a layer that keeps a convolution's or a recurrent state in the cache; None if no module
    does."""
    return next((m for m in layer.modules() if hasattr(m, "layer_idx") and _keeps_state(type(m))), None)


def _keeps_state(kind: type) -> bool:
    """Whether any method of a class stores a state. All methods are searched, since a class may have one forward for
    each kernel."""
    return any("update_conv_state" in _names(f) for f in vars(kind).values() if callable(f))


def layer_kinds(config: Any) -> list[str]:
    """List what each decoder layer caches: one of EVICTS, from which slots may be evicted; SLIDING, STATE or NOTHING,
    which are left as they are; or the class name of a cache layer that kvevict refuses. A sliding window as long as the
    model's context counts as full attention."""
    from transformers import cache_utils

    context = setting(config, "max_position_embeddings") or float("inf")

    def kind(layer: Any) -> str:
        name = type(layer).__name__
        if type(layer) is not getattr(cache_utils, name, None):
            return name
        found = _KINDS.get(name, name)
        return FULL_ATTENTION if found == SLIDING and layer.sliding_window >= context else found

    return [kind(layer) for layer in cache_utils.DynamicCache(config=config).layers]


def heads(config: Any) -> tuple[Any, Any]:
    """Return (number of query heads, number of kv heads) of the layers that evict; None in place of a number in which
    these layers differ."""
    kinds = layer_kinds(config)
    every = setting(config, "num_attention_heads_per_layer")  # a number for each layer, in Laguna's config
    queries = _alike(every or setting(config, "num_attention_heads"), kinds)
    if is_latent(config):
        return queries, queries
    if config.model_type == "gpt_bigcode" and config.multi_query:
        return queries, 1
    keys = setting(config, "num_key_value_heads")
    if keys is None and setting(config, "per_layer_config"):
        keys = [setting(each, "num_key_value_heads") or queries for each in config.per_layer_config]
    return queries, queries if keys is None else _alike(keys, kinds)


def readers(config: Any) -> dict[int, int | None]:
    """Map the index of each layer that reads another layer's keys and values to the index of that layer: the last layer
    before it that has its type and stores keys and values; None if there is no such layer. Layers that read from a
    layer that does not evict are left out."""
    kinds, found = layer_kinds(config), {}
    modes, types = setting(config, "kv_sharing_modes") or (), setting(config, "layer_types") or ()
    for index, mode in enumerate(modes):
        if mode == "reuse" and kinds[index] == NOTHING:
            producer = max((i for i in range(index) if modes[i] == "store" and types[i] == types[index]), default=None)
            if producer is None or kinds[producer] in EVICTS:
                found[index] = producer
    return found


def slot_heads(config: Any) -> int:
    """Return the number of a layer's kv heads that choose and store slots. Latents (MLA) are shared by all heads and
    count as one head."""
    return 1 if is_latent(config) else heads(config)[1]


def _alike(value: object, kinds: list) -> Any:
    """Return `value`, a number in a config. If it is a list with a number for each layer, return the number of the
    layers that evict, or None if these differ."""
    if not isinstance(value, (list, tuple)):
        return value
    own = {n for n, kind in zip(value, kinds, strict=True) if kind in EVICTS}
    return own.pop() if len(own) == 1 else None


def is_latent(config: Any) -> bool:
    """Whether the model's attention caches latents that all heads share (MLA, multi-head latent attention)."""
    return bool(setting(config, "kv_lora_rank"))


def head_dim(module: Any, config: Any) -> int:
    """Return the width of an attention module's queries and keys."""
    if hasattr(module, "qk_nope_head_dim"):
        return module.qk_nope_head_dim + module.qk_rope_head_dim
    for owner, name in ((module, "qk_head_dim"), (module, "head_dim"), (module, "head_size"), (config, "head_dim")):
        if isinstance(setting(owner, name), int):
            return setting(owner, name)
    return config.hidden_size // config.num_attention_heads


def widths(module: Any, config: Any) -> tuple[int, int]:
    """Return (width of each of a stored slot's rows `k` and `v`, width of the keys and values that attention reads),
    both rounded up to a multiple of 8. They differ for latents (MLA), whose halves are stored as `k` and `v`."""
    read = -(-max(head_dim(module, config), getattr(module, "v_head_dim", None) or 0) // 8) * 8
    if not is_latent(config):
        return read, read
    return -(-(module.kv_lora_rank + module.qk_rope_head_dim) // 16) * 8, read


def setting(owner: Any, name: str) -> Any:
    """Return the attribute `name` of a config or module; None if it is missing, or if its value differs by layer."""
    try:
        return getattr(owner, name, None)
    except Exception as error:
        if type(error).__name__ == "AmbiguousGlobalPerLayerAttributeError":
            return None
        raise


def reasons(config: Any) -> list[str]:
    """List the reasons, found in a model's config, why slots cannot be evicted from its cache; [] if there are none."""
    if getattr(config, "is_encoder_decoder", False):
        return ["it is an encoder-decoder model; only decoder-only models are supported"]
    found = []
    if setting(config, "use_bidirectional_attention") in (True, "all") or setting(config, "is_causal") is False:
        found.append("its attention is bidirectional; only causal models are supported")
    if setting(config, "alibi") or config.model_type in ("bloom", "mpt"):
        found.append("ALiBi adds a bias to attention that depends on distance")
    if setting(config, "num_kv_shared_layers") and setting(config, "kv_sharing_modes") is None:
        found.append(
            "this version of Transformers does not say which layers share keys and values; install a newer one"
        )
    if found:
        return found
    try:
        kinds = set(layer_kinds(config))
    except Exception as error:
        return [f"Transformers makes no cache from its config ({type(error).__name__}: {error})"]
    strange = sorted(kinds - {FULL_ATTENTION, SLIDING, STATE, FULL_ATTENTION_AND_STATE, NOTHING})
    if strange:
        return [f"layers with a recurrent state or another cache that cannot be evicted from ({', '.join(strange)})"]
    if not kinds & set(EVICTS):
        only = "every layer has a sliding window, so the cache is bounded already"
        if {STATE, NOTHING} & kinds:
            only = "no layer has full attention: each keeps a state or a sliding window, of bounded size"
        return [f"{only}: there is nothing to evict"]
    return []


def output_of(module: torch.nn.Module) -> Any:
    """Return the output projection of an attention module; None if no child has one of the names `OUTPUTS`."""
    return next((getattr(module, name) for name in OUTPUTS if hasattr(module, name)), None)


def output_weight(module: torch.nn.Module, dtype: torch.dtype, split: bool = False) -> torch.Tensor:
    """Return W_O [E, H * Dv], the weight of an attention module's output projection, without the bias. split: return
    the columns of this rank's heads only (tensor parallel). A weight that is not a plain tensor (quantised, offloaded,
    with a LoRA) is measured, by projecting unit vectors of the dtype `dtype`."""
    from transformers.pytorch_utils import Conv1D

    linear = output_of(module)
    if type(linear) in (torch.nn.Linear, Conv1D) and linear.weight.device.type != "meta":
        weight: Any = linear.weight.detach()
        weight = weight.T if type(linear) is Conv1D else weight
        if hasattr(weight, "to_local"):  # a DTensor, split over ranks
            weight = weight.to_local() if split else weight.full_tensor()
        return weight
    # A wrapper around a linear module may lack in_features, but the linear module in it has them.
    columns = next((part.in_features for part in linear.modules() if hasattr(part, "in_features")), 0)
    unit = torch.eye(columns or len(linear.weight), dtype=dtype, device=device_of(linear))
    with torch.no_grad():
        return (linear(unit) - linear(torch.zeros_like(unit[:1]))).T


def counts_tokens(decoder: Any) -> bool:
    """Whether a decoder, when it is called without positions, numbers only the tokens of a row and not its padding."""
    return decoder.config.model_type == "opt"


def context_of(config: Any) -> int | None:
    """Return the largest number of tokens that a decoder's configuration allows; None if it has no such number.
    max_position_embeddings may be the length before the context was extended, so the scaled length of the rotary
    embedding (factor * original length) counts if it is larger."""
    most = setting(config, "max_position_embeddings")
    if most is None:
        return None
    ropes = setting(config, "rope_parameters") or {}
    found = [each for each in ropes.values() if isinstance(each, dict)] or [ropes]
    scaled = ((each.get("factor") or 1) * (each.get("original_max_position_embeddings") or most) for each in found)
    return int(max(most, *scaled))
