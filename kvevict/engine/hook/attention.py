"""The attention function of patched layers: attend to a layer's stored and new slots, then evict some of them."""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ...context import context, current
from ...models import compat, families
from ..measure import unseen
from ..memory.layer import EvictionLayer, fit
from ..read.layer import LayerCall, attend, decide, evict
from ..read.step import Step, paused
from .standin import UNTRACED, untraced

NAME = "kvevict"
ORIGINAL = "_kvevict_original"  # attribute of a module's changed config: the original config


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, Any]:
    """Attend and evict, with the signature of Transformers' attention interface: query [B, H, T, D], key and value
    [B, Hkv, T, D] -> (attention output [B, T, H, D], None).

    Without a running `Step` (training, use_cache=False) the model's original attention function is called.
    """
    here = context()
    if here.step is None:
        return _unpatched(
            module, query, key, value, attention_mask, scaling=scaling, softcap=softcap, s_aux=s_aux, **kwargs
        )
    step = here.step.on(query.device)
    if here.pause is not None:
        paused(here.pause)
    hidden = step.hidden.pop(module.layer_idx, None)
    options = dict(scale=scaling, softcap=softcap or 0.0, sinks=None if s_aux is None else s_aux.float())
    if module.layer_idx in step.plan.readers:
        return _read(step, module, query, key, value, options), None
    layer, width = step.cache.layers[module.layer_idx], value.shape[-1]
    new = layer.take(module, key, value)
    if (query.shape[1], key.shape[1]) != step.plan.local_heads:
        raise ValueError(
            f"layer {module.layer_idx} has {query.shape[1]} and {key.shape[1]} heads of queries and of keys, by its "
            f"config {step.plan.local_heads}: patch a whole model, or all that from_pretrained(tp_plan=...) returned"
        )
    query, key, value = _stored_form(layer, query, key, value)
    new = (key, value) if new is None else new
    archive_kv = None if step.decoding else step.plan.run.archive_kv
    if archive_kv is not None or not layer.is_represented:
        _represent(step, module.layer_idx, archive_kv, query, key, value, options)
    call = LayerCall(step, module, query, key, value, new, options, hidden)
    attend(call)
    decide(call)
    return call.out[..., :width], None


def _represent(
    step: Step, index: int, archive_kv: str | None, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    options: dict,
) -> None:  # fmt: skip
    """Choose how a layer packs the keys and values that it stores. This is done before the layer attends, from the
    first keys and values that it will store. archive_kv: how the slots of all tokens are packed (`Tiers.every`); None:
    leave them alone."""
    layer, chunk = step.cache.layers[index], key.shape[2] - step.appended
    first = step.first.clamp_max(chunk)  # number of padding columns in the chunk
    seen: Any = *(x[:, :, :chunk] for x in (query, key, value)), first, options, step.plan.ranks
    if not layer.is_represented:
        layer.represent(step.plan.run.kv, *seen)
        if step.decoding:  # `Step.through` counts a decoded token only in layers whose packing was chosen before it
            layer.tick()
    if archive_kv is not None:
        step.cache.tiers.represent(index, archive_kv, *seen)


def _stored_form(layer: EvictionLayer, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Cast tensors to the dtype of the layer's first keys (autocast may give later keys another dtype), and pad them to
    one width."""
    return fit(*[x.to(layer.dtype) for x in tensors])


def _read(
    step: Step, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict
) -> torch.Tensor:
    """Attend, in a layer that reads another layer's keys and values (the producer's), to the producer's stored slots
    and its new keys and values [B, Hkv, S, D]. query [B, H, T, D] has the call's last T rows. Once the last of the
    producer's readers has attended, the producer's slots are chosen."""
    producer = step.plan.readers[module.layer_idx]
    layer, width = step.cache.layers[producer], value.shape[-1]
    query, key, value = _stored_form(layer, query, key, value)
    # While decoding, the producer has stored the token's row already; it is passed as a new row instead
    held = layer.storage.held(layer.len - int(step.decoding))
    with step.meter.clock("attend"):
        out, _ = unseen.attend(step, query, key, value, held, layer.longest(), options)
    if producer in step.unread and step.plan.last_reader[producer] == module.layer_idx:
        evict(step.unread.pop(producer))
    return out[..., :width]


class _WithConfig:
    """A view of a diverted attention module that shows its original config, for the original attention function."""

    def __init__(self, module: torch.nn.Module, config: object) -> None:
        self.__dict__.update(module=module, config=config)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def _unpatched(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, *more: object, **options: object
) -> tuple:
    """Call a module's original attention function with the arguments that `attention` got."""
    note = context().note
    if note is not None:
        note(module, query, key)
    config = original(module)
    options = {name: value for name, value in options.items() if value is not None}
    return compat.base_attention(module, config)(_WithConfig(module, config), query, key, *more, **options)


def note_inputs(decoder: torch.nn.Module, order: Iterable[int]) -> list[RemovableHandle]:
    """Add hooks to the attention modules of the layers `order`. In calls whose policy needs it, the hooks put the input
    of each attention block into `Step.hidden`."""
    return [m.register_forward_pre_hook(_note, with_kwargs=True) for m in families.attentions(decoder, order)]


def _note(module: Any, args: tuple, kwargs: Any = None) -> None:
    step = current()
    if step is not None and step.plan.wants_hidden:
        step.hidden[module.layer_idx] = args[0] if args else kwargs["hidden_states"]


def divert(module: Any, name: str = NAME) -> None:
    """Make an attention module call the function registered as `name`: give the module a changed copy of its config."""
    config = copy.copy(module.config)
    config.__dict__[ORIGINAL] = module.config
    config._attn_implementation_internal = name
    module.config = config


def original(module: Any) -> Any:
    """The config that a module had before `divert`; for a module that is not diverted, its present config."""
    return module.config.__dict__.get(ORIGINAL, module.config)


def restore(module: Any) -> None:
    """Give an attention module back the config that it had before `divert`."""
    module.config = original(module)


def register() -> None:
    """Register `attention` with Transformers under `NAME`. Called when a model is patched, not on import."""
    from transformers import AttentionInterface  # not at the top: this imports the dependencies of all models

    AttentionInterface.register(NAME, untraced(attention))


UNTRACED[attention] = True
