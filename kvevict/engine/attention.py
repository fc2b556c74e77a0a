"""The attention function that patched layers call: attend over [stored | new], then let `evict` decide what stays."""

from transformers import AttentionInterface

from .. import _ops, compat
from . import evict, rerotate
from .step import current
from .view import View

NAME = "kvevict"


def attention(module, query, key, value, attention_mask, scaling=None, softcap=None, s_aux=None, **kwargs):
    """Transformers' attention interface: query [B, H, T, D], key and value [B, Hkv, T, D] -> ([B, T, H, D], None).

    Outside a call of the patched decoder that uses a cache (training, use_cache=False) the model's own function runs.
    """
    step = current()
    if step is None:
        return _unpatched(
            module, query, key, value, attention_mask, scaling=scaling, softcap=softcap, s_aux=s_aux, **kwargs
        )
    layer = step.cache.layers[module.layer_idx]
    fresh, layer.fresh = layer.fresh, None
    if fresh is None or fresh[0] is not key or fresh[1] is not value:
        raise RuntimeError(
            f"{type(module).__name__} changed keys or values after the cache update; kvevict cannot evict from it"
        )
    # Under autocast they differ; what is stored decides.
    query, key, value = (x if x.dtype == layer.k.dtype else x.to(layer.k.dtype) for x in (query, key, value))
    patch = step.patch
    options = dict(scale=scaling, softcap=softcap or 0.0, sinks=None if s_aux is None else s_aux.float())
    if step.decoding:
        columns = layer.longest() + 1 if patch.wants_probs else 0
        with patch.clock("decode"), rerotate.in_cache(step, module, layer):
            out, lse, probs = layer.decode(query, key, value, step.positions, columns=columns, **options)
        layer.advance(1, 1)
        if patch.watches_tokens:
            empty = key[:, :, :0], value[:, :, :0]
            probs = probs if patch.wants_probs else None
            evict.after_token(View(step, layer, module.layer_idx, module, query, *empty, out, lse, options, probs))
        return out, None
    with patch.clock("attend"), rerotate.in_cache(step, module, layer):
        out, lse = _ops.attend(query, layer.k, layer.v, layer.offset, layer.len, key, value, step.first, **options)
    view = View(step, layer, module.layer_idx, module, query, key, value, out, lse, options)
    patch.watch_peak(step, view)
    columns, tokens = step.whole or (view.k.shape[2], view.k.shape[2] - view.padding)
    layer.advance(columns, tokens)
    if step.whole:
        layer.tail = 0  # slots are fewer than columns
    if step.read is None:
        evict.after_append(view)
    else:
        with patch.clock("evict"):
            evict.after_chunk(view)
    return out, None


class _WithConfig:
    """A module as it is, but under its original config: what the model's own attention function reads."""

    def __init__(self, module, config):
        self.__dict__.update(module=module, config=config)

    def __getattr__(self, name):
        return getattr(self.module, name)


def _unpatched(module, query, key, value, attention_mask, **options):
    config = module.config.__dict__["_kvevict_original"]
    options = {name: value for name, value in options.items() if value is not None}
    return compat.base_attention(module, config)(
        _WithConfig(module, config), query, key, value, attention_mask, **options
    )


def register() -> None:
    """Make the name known to Transformers; patching does, importing does not."""
    AttentionInterface.register(NAME, attention)
