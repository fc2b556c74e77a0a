"""The attention function of patched layers: attend over [stored | new], then let the step's chooser evict slots."""

import copy
import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ...context import context, current
from ...models import compat, families
from ..measure import unseen
from ..memory import archive
from ..memory.layer import fit
from ..read.layer import LayerCall, attend, decide
from ..read.step import paused

NAME = "kvevict"
ORIGINAL = "_kvevict_original"  # attribute of our copy of a module's config: the original config


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, Any]:
    """Transformers' attention interface: query [B, H, T, D], key and value [B, Hkv, T, D] -> ([B, T, H, D], None).

    The model's original function runs outside a call of the patched decoder with a cache (training, use_cache=False).
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
    archives = step.plan.run.archive_kv is not None and not step.decoding
    if archives or not layer.is_represented:
        _represent(step, layer, archives, query, key, value, options)
    call = LayerCall(step, module, query, key, value, new, options, hidden)
    attend(call)
    decide(call)
    return call.out[..., :width], None


def _represent(
    step: Any, layer: Any, archives: bool, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict
) -> None:
    """Before a layer attends: choose how what it has not stored before is stored. archives: in an archive, too."""
    run, chunk = step.plan.run, key.shape[2] - step.appended
    first = step.first.clamp_max(chunk)  # a row of padding alone
    seen = *(x[:, :, :chunk] for x in (query, key, value)), first, options, step.plan.ranks
    if not layer.is_represented:
        layer.represent(run.kv, *seen)
        if step.decoding:  # `Step.through` has counted the token in the others
            layer.tick()
    if archives:
        archive.represent(layer, run.archive_kv, *seen)


def _stored_form(layer: Any, *tensors: Any) -> list:
    """Cast query, keys and values to the dtype of the layer's first keys (autocast may change it), and pad them to one
    width."""
    return fit(*(x if x.dtype == layer.dtype else x.to(layer.dtype) for x in tensors))


def _read(
    step: Any, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict
) -> torch.Tensor:
    """Attention of a layer over another layer's slots and new rows. query [B, H, T, D]: of the call's last T rows;
    key and value [B, Hkv, S, D]."""
    producer = step.plan.readers[module.layer_idx]
    layer, width = step.cache.layers[producer], value.shape[-1]
    query, key, value = _stored_form(layer, query, key, value)
    held = layer.storage.held(layer.len - int(step.decoding))  # a decoded token's row is stored already
    with step.meter.clock("attend"):
        out, _ = unseen.attend(step, query, key, value, held, layer.longest(), options)
    if producer in step.unread and step.plan.last_reader[producer] == module.layer_idx:
        with step.meter.clock("evict"):
            step.chooser.layer(step.unread.pop(producer))
    return out[..., :width]


class _WithConfig:
    """A module with its original config, as the model's original attention function reads it."""

    def __init__(self, module: torch.nn.Module, config: Any) -> None:
        self.__dict__.update(module=module, config=config)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def _unpatched(module: Any, query: torch.Tensor, key: torch.Tensor, *more: Any, **options: Any) -> tuple:
    note = context().note
    if note is not None:
        note(module, query, key)
    config = original(module)
    options = {name: value for name, value in options.items() if value is not None}
    return compat.base_attention(module, config)(_WithConfig(module, config), query, key, *more, **options)


def note_inputs(decoder: torch.nn.Module, order: Iterable[int]) -> list[RemovableHandle]:
    """Hooks that put the input of a layer's attention block into `Step.hidden`, where a policy needs it; the layer's
    call takes it from there."""
    return [m.register_forward_pre_hook(_note, with_kwargs=True) for m in families.attentions(decoder, order)]


def _note(module: Any, args: Any, kwargs: Any = None) -> None:
    step = current()
    if step is not None and step.plan.wants_hidden:
        step.hidden[module.layer_idx] = args[0] if args else kwargs["hidden_states"]


def divert(module: Any, name: str = NAME) -> None:
    """Have an attention module call `attention`, or another function by its name, by a changed copy of its config."""
    config = copy.copy(module.config)
    config.__dict__[ORIGINAL] = module.config
    config._attn_implementation_internal = name
    module.config = config


def original(module: Any) -> Any:
    """The config of a module before `divert`; a call may have begun before it."""
    return module.config.__dict__.get(ORIGINAL, module.config)


def restore(module: Any) -> None:
    module.config = original(module)


def register() -> None:
    """Make the name known to Transformers; patching does, importing does not."""
    from transformers import AttentionInterface  # it imports the dependencies of all models, so not on top

    AttentionInterface.register(NAME, _untraced())


@functools.cache
def _untraced() -> Any:
    """`attention`, left out of torch.compile's graphs. A decorator would import Dynamo with the package."""
    return torch.compiler.disable(attention)
