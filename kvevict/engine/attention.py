"""The attention function that patched layers call: attend over [stored | new], then let the call's chooser decide what
stays."""

import contextlib
import copy
import functools
from contextvars import ContextVar

import torch

from .. import _ops, compat
from . import rerotate
from .cache import fit
from .step import current, shared_call
from .view import View

NAME = "kvevict"
ORIGINAL = "_kvevict_original"  # attribute of our copy of a module's config: the config it had
_note: ContextVar = ContextVar("kvevict_note", default=None)  # (module, query, key) of what runs unpatched


def attention(module, query, key, value, attention_mask, scaling=None, softcap=None, s_aux=None, **kwargs):
    """Transformers' attention interface: query [B, H, T, D], key and value [B, Hkv, T, D] -> ([B, T, H, D], None).

    Outside a call of the patched decoder that uses a cache (training, use_cache=False) the model's own function runs.
    """
    step = current()
    if step is None:
        return _unpatched(
            module, query, key, value, attention_mask, scaling=scaling, softcap=softcap, s_aux=s_aux, **kwargs
        )
    step, shared = step.on(query.device), shared_call.get()
    if shared is not None and not shared.given:
        shared.given = module, query, key, value, attention_mask
        shared.options = dict(scaling=scaling, softcap=softcap, s_aux=s_aux)
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
    call = step, layer, module.layer_idx, module, query
    new = (key, value) if new is None else new
    if step.decoding:
        return _decoded(call, key, value, new, options)[..., :width], None
    slots = layer.slots(module)
    with step.meter.clock("attend"), rerotate.in_cache(step, module, slots):
        stored = slots.k, slots.v, slots.offset, slots.len
        known = None if shared is None else shared.attended
        out, lse = known or _ops.attend(query, *stored, key, value, step.first, **options)
    if shared is not None:
        shared.attended = out, lse
    view = View(*call, key, value, out, lse, options, new=new)
    view.slots = slots
    step.meter.watch(view, 1 + step.chooser.held)
    layer.advance(*step.seen)
    if step.seen[0] != view.k.shape[2]:
        layer.tail = 0  # slots are fewer than columns
    _choose(view)
    return out[..., :width], None


def _stored_form(layer, *tensors):
    """Query, keys and values in the dtype of what is stored, which under autocast is another, and of one width."""
    return fit(*(x if x.dtype == layer.k.dtype else x.to(layer.k.dtype) for x in tensors))


def _choose(view):
    """Let the call's chooser decide what stays, or wait until the last layer that reads these slots did."""
    if view.index in view.step.patch.last_reader:
        view.step.shared[view.index] = view
        return
    with view.step.meter.clock("evict"):
        view.step.chooser.layer(view)


def _read(step, module, query, key, value, options):
    """Attention of a layer that reads another one's slots and that one's new rows. query [B, H, T, D]: of the call's
    last T rows; key and value [B, Hkv, S, D]."""
    producer = step.patch.readers[module.layer_idx]
    layer, view = step.cache.layers[producer], step.shared.get(producer)
    width = value.shape[-1]
    query, key, value = _stored_form(layer, query, key, value)
    stored = layer.len - int(step.decoding)  # a decoded token's row is stored already
    with step.meter.clock("attend"), rerotate.in_cache(step, module, layer, stored):
        out, _ = _ops.attend(query, layer.k, layer.v, layer.offset, stored, key, value, step.first, **options)
    if view is not None and step.patch.last_reader[producer] == module.layer_idx:
        with step.meter.clock("evict"):
            step.chooser.layer(step.shared.pop(producer))
    return out[..., :width]


def _decoded(call, key, value, new, options):
    step, layer, _, module, query = call
    probs_wanted = step.patch.wants_probs
    columns = layer.longest() + 1 if probs_wanted else 0
    with step.meter.clock("decode"), rerotate.in_cache(step, module, layer):
        out, lse, probs = layer.decode(query, *new, step.positions, module, columns=columns, **options)
    layer.advance(1, 1)
    if step.chooser is not None:
        none, new = ([x[:, :, :0] for x in pair] for pair in ((key, value), new))
        _choose(View(*call, *none, out, lse, options, probs if probs_wanted else None, new))
    return out


class _WithConfig:
    """A module as it is, but under its original config: what the model's own attention function reads."""

    def __init__(self, module, config):
        self.__dict__.update(module=module, config=config)

    def __getattr__(self, name):
        return getattr(self.module, name)


def _unpatched(module, query, key, value, attention_mask, **options):
    if _note.get() is not None:
        _note.get()(module, query, key)
    config = module.config.__dict__[ORIGINAL]
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


@contextlib.contextmanager
def overheard(modules, note):
    """Inside, note(module, query, key) is told what unpatched calls of these modules attend with."""
    register()
    ours = [module for module in modules if ORIGINAL not in module.config.__dict__]
    token = _note.set(note)
    try:
        for module in ours:
            divert(module)
        yield
    finally:
        for module in ours:
            restore(module)
        _note.reset(token)


def register() -> None:
    """Make the name known to Transformers; patching does, importing does not."""
    from transformers import AttentionInterface  # which imports what all models need, so not on top

    AttentionInterface.register(NAME, _untraced())


@functools.cache
def _untraced():
    """`attention`, which torch.compile leaves out of its graphs. No decorator, as that would import Dynamo."""
    return torch.compiler.disable(attention)
