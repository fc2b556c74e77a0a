"""The attention function that patched layers call: attend over [stored | new], then let the call's chooser decide what
stays."""

import copy
import functools

import torch

from ... import _ops, compat
from ...context import context
from ..read import decode
from ..read.layer_call import layer_call
from ..slots.cache import fit

NAME = "kvevict"
ORIGINAL = "_kvevict_original"  # attribute of our copy of a module's config: the config it had


def attention(module, query, key, value, attention_mask, scaling=None, softcap=None, s_aux=None, **kwargs):
    """Transformers' attention interface: query [B, H, T, D], key and value [B, Hkv, T, D] -> ([B, T, H, D], None).

    Outside a call of the patched decoder that uses a cache (training, use_cache=False) the model's own function runs.
    """
    now = context()
    if now.step is None:
        return _unpatched(
            module, query, key, value, attention_mask, scaling=scaling, softcap=softcap, s_aux=s_aux, **kwargs
        )
    step, tap = now.step.on(query.device), now.tap
    hidden = step.hidden.pop(module.layer_idx, None)
    if tap is not None:
        tap.called(module, query, key, value, attention_mask, dict(scaling=scaling, softcap=softcap, s_aux=s_aux))
    options = dict(scale=scaling, softcap=softcap or 0.0, sinks=None if s_aux is None else s_aux.float())
    if module.layer_idx in step.patch.readers:
        return _read(step, module, query, key, value, options), None
    layer, width = step.cache.layers[module.layer_idx], value.shape[-1]
    new = layer.take(module, key, value)
    if (query.shape[1], key.shape[1]) != step.patch.local_heads:
        raise ValueError(
            f"layer {module.layer_idx} has {query.shape[1]} and {key.shape[1]} heads of queries and of keys, by its "
            f"config {step.patch.local_heads}: patch a whole model, or all that from_pretrained(tp_plan=...) returned"
        )
    query, key, value = _stored_form(layer, query, key, value)
    new = (key, value) if new is None else new
    if step.decoding:
        call, out = decode.attend(step, layer, module, query, key, value, new, options, hidden)
        if call is not None:
            _choose(call)
        return out[..., :width], None
    slots = layer.slots(module)

    def attend():
        return _ops.attend(query, slots.k, slots.v, slots.offset, slots.len, key, value, step.first, **options)

    with step.meter.clock("attend"):
        out, lse = attend() if tap is None else tap.attended(attend)
    call = layer_call(step, layer, module, query, key, value, out, lse, options, new=new, hidden=hidden, read=slots)
    step.meter.watch(call, 1 + step.chooser.held)
    layer.advance(*step.seen)
    if step.seen[0] != call.new[0].shape[2]:
        layer.removable = 0  # slots are fewer than columns
    _choose(call)
    return out[..., :width], None


def _stored_form(layer, *tensors):
    """Query, keys and values in the dtype of what is stored, which under autocast is another, and of one width."""
    return fit(*(x if x.dtype == layer.k.dtype else x.to(layer.k.dtype) for x in tensors))


def _choose(call):
    """Let the call's chooser decide what stays, or wait until the last layer that reads these slots did."""
    if call.slots.index in call.step.patch.last_reader:
        call.step.unread[call.slots.index] = call
        return
    with call.step.meter.clock("evict"):
        call.step.chooser.layer(call)


def _read(step, module, query, key, value, options):
    """Attention of a layer that reads another one's slots and that one's new rows. query [B, H, T, D]: of the call's
    last T rows; key and value [B, Hkv, S, D]."""
    producer = step.patch.readers[module.layer_idx]
    layer, width = step.cache.layers[producer], value.shape[-1]
    query, key, value = _stored_form(layer, query, key, value)
    stored = layer.len - int(step.decoding)  # a decoded token's row is stored already
    with step.meter.clock("attend"):
        out, _ = _ops.attend(query, layer.k, layer.v, layer.offset, stored, key, value, step.first, **options)
    if producer in step.unread and step.patch.last_reader[producer] == module.layer_idx:
        with step.meter.clock("evict"):
            step.chooser.layer(step.unread.pop(producer))
    return out[..., :width]


class _WithConfig:
    """A module as it is, but under its original config: what the model's own attention function reads."""

    def __init__(self, module, config):
        self.__dict__.update(module=module, config=config)

    def __getattr__(self, name):
        return getattr(self.module, name)


def _unpatched(module, query, key, value, attention_mask, **options):
    note = context().note
    if note is not None:
        note(module, query, key)
    config = module.config.__dict__.get(ORIGINAL, module.config)  # of a call that began before it was diverted
    options = {name: value for name, value in options.items() if value is not None}
    return compat.base_attention(module, config)(
        _WithConfig(module, config), query, key, value, attention_mask, **options
    )


def divert(module) -> None:
    """Have an attention module call `attention`: it gets a copy of its config that says so."""
    config = copy.copy(module.config)
    config.__dict__[ORIGINAL] = module.config
    config._attn_implementation_internal = NAME
    module.config = config


def restore(module) -> None:
    module.config = module.config.__dict__[ORIGINAL]


def register() -> None:
    """Make the name known to Transformers; patching does, importing does not."""
    from transformers import AttentionInterface  # which imports what all models need, so not on top

    AttentionInterface.register(NAME, _untraced())


@functools.cache
def _untraced():
    """`attention`, which torch.compile leaves out of its graphs. No decorator, as that would import Dynamo."""
    return torch.compiler.disable(attention)
