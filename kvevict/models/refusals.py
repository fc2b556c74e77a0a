"""Finds the reasons why a loaded model cannot be patched, among them those that `families.reasons` finds in its
config."""

from typing import Any

import torch

from ..engine.memory import ranks
from ..ops import _ops
from . import compat, families, rotary
from .families import base_model, find_decoder


def check_model(model: Any) -> None:
    """Raise a ValueError with the reasons why a model's decoder cannot be patched, if there are any."""
    decoder = find_decoder(model)
    reasons = families.reasons(decoder.config) or _of_structure(decoder)
    reasons = reasons or _of_loaded(model, decoder)
    if reasons:
        raise ValueError(f"{type(decoder).__name__} cannot be patched: " + "; ".join(reasons))


def _of_structure(decoder: torch.nn.Module) -> list[str]:
    """List the reasons, found in a decoder's modules, why it cannot be patched although `families.reasons` found no
    reason in its config."""
    kinds, layers = families.layer_kinds(decoder.config), families.layers_of(decoder)
    if len(kinds) != len(layers):
        return [f"it has {len(layers)} layers and caches for {len(kinds)}"]
    for index, (layer, kind) in enumerate(zip(layers, kinds, strict=True)):
        if kind not in families.EVICTS:
            continue
        module = families.attention_of(layer, index)
        if module is None:
            return [f"layer {index} has no single module that calls Transformers' attention interface"]
        if families.is_latent(decoder.config) and not hasattr(module, "expand_kv"):
            return [
                f"{type(module).__name__} does not cache its latents (MLA); install a newer version of Transformers"
            ]
        if getattr(module, "is_causal", True) is False:
            return ["its attention is bidirectional; only causal models are supported"]
        if compat.takes(type(module).forward, "cross_attention_states"):
            return [f"layer {index} attends to pictures (cross-attention): its keys are not the text's"]
        if kind == families.FULL_ATTENTION_AND_STATE and families.mixer_of(layer) is None:
            return [f"layer {index} keeps a state in an unknown module"]
    if not rotary.axes(decoder) and "mrope_section" in (families.setting(decoder.config, "rope_parameters") or ()):
        return ["attention joins the axes of its positions (M-RoPE) itself; install a newer version of Transformers"]
    for index, producer in families.readers(decoder.config).items():
        last = families.evicting(decoder.config)[-1]
        if families.attention_of(layers[index], index) is None or producer != last:
            return [f"layer {index} reads the keys and values of an unknown other layer"]
    if None in families.heads(decoder.config):
        return ["its full-attention layers differ in their number of heads"]
    return []


def _of_loaded(model: torch.nn.Module, decoder: torch.nn.Module) -> list[str]:
    """List the reasons why a loaded model cannot be patched although others of its type can be: its dtype, its device,
    its attention implementation, how it is split over ranks, or its head dimension."""
    reasons, own = [], families.attentions(decoder, families.evicting(decoder.config))
    implementation = own[0].config._attn_implementation
    if "flex" in implementation or "paged" in implementation:
        reasons.append(f"attention implementation {implementation!r} is not supported; load with 'sdpa'")
    size, heads = ranks.of(base_model(model)).size, families.heads(decoder.config)[1]
    if (getattr(base_model(model), "tp_size", None) or 1) > 1 and families.is_latent(decoder.config):
        reasons.append("its heads share latents, which cannot be split over ranks (tensor parallel); load it unsplit")
    elif heads % size:
        reasons.append(
            f"its {heads} kv heads cannot be split over {size} ranks (tensor parallel); start as many processes as "
            "divide them"
        )
    if next(decoder.parameters()).dtype == torch.float64:
        reasons.append("its weights are float64; load it as float32, bfloat16 or float16")
    devices = sorted({str(families.device_of(module)) for module in own})
    on_gpu = any(device.startswith("cuda") for device in devices)
    for device in devices:
        if device.split(":")[0] not in (*_ops.DEVICES, "meta"):
            built = "CPU and CUDA" if "cuda" in _ops.DEVICES else "CPU"
            reasons.append(f"it is on {device}, and this build has {built} kernels only; call model.to('cpu')")
    latent, most = families.is_latent(decoder.config), 256 if on_gpu else 512
    dims = {families.head_dim(module, decoder.config) for module in own}
    dims = {max(families.widths(module, decoder.config)) for module in own} if latent else dims
    for dim in sorted(dims):
        if dim % 8 or not 8 <= dim <= most:
            reasons.append(f"head_dim {dim} is not a multiple of 8 up to {most}" + (" (on a GPU)" if on_gpu else ""))
    if len(dims) > 1:
        reasons.append(f"its layers have heads of {', '.join(map(str, sorted(dims)))} dimensions")
    return reasons
