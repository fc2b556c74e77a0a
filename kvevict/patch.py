"""Install eviction into a loaded model, and take it out again."""

import contextlib
import threading
import warnings
from weakref import WeakKeyDictionary

import torch

from . import _ops, families, known, trial
from .compat import STATE
from .engine import attention, forward, hidden, propagate, quantities, ranks, rerotate, residual, states
from .engine.meter import Meter
from .families import base_model, find_decoder
from .policy.policy import build


class Patch:
    """What one patched model carries: its policy, which layers evict, and each thread's last read. It has no reference
    to the model, so that copies of the model stay independent."""

    def __init__(self, policy, decoder, ranks):
        self.policy, self.ranks = policy, ranks
        self.kinds = kinds = families.layer_kinds(decoder.config)
        heads = families.heads(decoder, kinds)
        self.local_heads = heads[0] // ranks.size, heads[1] // ranks.size  # of queries and of keys, of this rank
        self.kv_heads = 1 if families.is_latent(decoder.config) else heads[1]  # of all ranks, that choose and store
        own = [index for index, kind in enumerate(kinds) if kind in families.EVICTS]
        self.order = {index: order for order, index in enumerate(own)}
        self.readers = families.readers(decoder, kinds)
        self.last_reader = {producer: index for index, producer in sorted(self.readers.items())}
        self.rotates, self.after_attention = {}, {}  # by layer, what `trial` found where the policy needs it
        policy.check_layers(len(own))
        policy.waiting_layers(len(own))  # or an error
        self.all_full_attention = set(kinds) == {families.FULL_ATTENTION}
        self.keeps_state = bool({families.STATE, families.FULL_ATTENTION_AND_STATE} & set(kinds))
        # The last layer that reads all tokens; None: all do.
        self.tsp = propagate.layer_of(policy, self.all_full_attention, len(kinds))
        self.wants_probs = policy.carry == "sum" or (policy.decode and policy.rows.newest)
        self.needed = quantities.of_policy(policy)
        self.wants_outputs = any(each.outputs for each in self.needed)
        self.wants_hidden = any(each.hidden for each in self.needed)
        # A score of one such quantity alone is that quantity, and decoded tokens carry it from the start.
        alone = len(self.needed) == 1 and self.needed[0].of_tokens and policy.carry == "keep"
        self.of_tokens = self.needed[0] if alone else None
        self.hooks = []
        self._forget()

    def _forget(self):
        self.meters = WeakKeyDictionary()  # thread -> Meter of its last read
        self.last_meter = Meter()  # of the last read in any thread

    def __getstate__(self):
        return {name: value for name, value in self.__dict__.items() if name not in ("meters", "last_meter")}

    def __setstate__(self, state):
        """Of a copy, possibly in another process: it has read nothing yet."""
        self.__dict__.update(state)
        self._forget()
        attention.register()

    def own_meter(self):
        """The meter of this thread's last read; a new one if nothing was read."""
        return self.meters.setdefault(threading.current_thread(), Meter())

    def keep(self, meter) -> None:
        """Take a read's meter as this thread's last."""
        self.meters[threading.current_thread()] = self.last_meter = meter


def patch(model, policy, *, budget=None, chunk_size=None, **options):
    """Make a loaded Transformers model read long prompts in chunks and keep a bounded KV cache; returns the model.

    policy      a preset's name (`kvevict.policies()` lists them) or a `kvevict.Policy`
    budget      slots kept per kv head and layer, window and sinks included (int), or the fraction kept, in (0, 1)
    chunk_size  tokens read at once, evicting after every chunk; None: the preset's own schedule
    options     any field of the policy or its score: window=16, decode=True, progress=True, ...

    model may be a pipeline, or in a PEFT, DistributedDataParallel or DataParallel wrapper.
    `model.generate(...)`, `model(ids)` and pipelines work as before. Patching again replaces the policy. Raises
    ValueError or TypeError, and leaves the model as it was, for an unknown name, an impossible number, or a model that
    cannot be patched.
    """
    chosen = build(policy, budget=budget, chunk_size=chunk_size, **options)
    decoder = find_decoder(model)
    check_model(model)
    split = ranks.of(base_model(model))
    if split.size > 1 and not chosen.rows.supports_tensor_parallel:
        raise ValueError(
            "lookahead's adapter is for unsplit projections, and each rank has a part of them (tensor parallel): load "
            "the model in one process, or choose another policy"
        )
    chosen.rows.ready(decoder)
    needed = quantities.of_policy(chosen)
    rotates = any(each.rotates for each in needed)
    rerotate.check(chosen, families.rope_depends_on_length(decoder), rotates)
    state = Patch(chosen, decoder, split)
    modules = [families.attention_of(families.layers_of(decoder)[index], index) for index in state.order]
    for each in needed:
        each.ready(decoder, modules)
    if not is_patched(decoder):
        check_type(model, decoder)
    top = base_model(model)
    if chosen.rerotate or chosen.rows.rotates or rotates:
        state.rotates = trial.rotating(top, decoder, state.order)
        state.rotates |= {reader: state.rotates[producer] for reader, producer in state.readers.items()}
    if chosen.layers.residual == "attention":
        state.after_attention = trial.after_attention(top, decoder, state.order)
    if is_patched(decoder):
        unpatch(model)
    _install(top, decoder, state)
    learned = _learned_tokens(model)
    if learned > chosen.keep_first:
        warnings.warn(
            f"a PEFT adapter puts {learned} learned tokens before every prompt, which may be evicted; "
            f"keep_first={learned} keeps them",
            stacklevel=2,
        )
    return model


def _install(top, decoder, state) -> None:
    attention.register()
    for module in own_modules(decoder, state):
        attention.divert(module)
    object.__setattr__(decoder, STATE, state)
    forward.install(top, decoder)
    states.install(decoder, state)
    state.hooks = [hook for part in (propagate, residual, hidden) for hook in part.install(decoder, state)]


def unpatch(model):
    """Give the model back exactly as it was before `patch`; does nothing on a model that is not patched."""
    try:
        decoder = find_decoder(model)
    except ValueError:  # no decoder that patch() would take
        return model
    if not is_patched(decoder):
        return model
    state = getattr(decoder, STATE)
    for hook in state.hooks:
        hook.remove()
    states.remove(decoder, state)
    forward.remove(base_model(model), decoder)
    for module in own_modules(decoder, state):
        attention.restore(module)
    object.__delattr__(decoder, STATE)
    return model


@contextlib.contextmanager
def evicting(model, policy, **options):
    """`with kvevict.evicting(model, "take", budget=512): ...`: patched inside, as it was before outside."""
    decoder = find_decoder(model)
    before = decoder.__dict__.get(STATE)
    patch(model, policy, **options)
    try:
        yield model
    finally:
        if before is None:
            unpatch(model)
        else:
            patch(model, before.policy)
            after = getattr(decoder, STATE)
            after.meters, after.last_meter = before.meters, before.last_meter


def _learned_tokens(model) -> int:
    """How many learned tokens a PEFT adapter puts before every prompt."""
    config = getattr(model, "active_peft_config", None) if hasattr(model, "get_base_model") else None
    return getattr(config, "num_virtual_tokens", None) or 0


def is_patched(decoder) -> bool:
    return STATE in decoder.__dict__


def own_modules(decoder, state):
    """The attention modules of the layers that evict, and of those that read their keys and values."""
    for index in (*state.order, *state.readers):
        yield families.attention_of(families.layers_of(decoder)[index], index)


def check_model(model) -> None:
    """Raise one ValueError with all the reasons why a model's decoder cannot be patched, if there are any."""
    decoder = find_decoder(model)
    reasons = families.reasons(decoder.config) or families.structure_reasons(decoder)
    reasons = reasons or unsupported_reasons(model, decoder)
    if reasons:
        raise ValueError(f"{type(decoder).__name__} cannot be patched: " + "; ".join(reasons))


def unsupported_reasons(model, decoder) -> list:
    """Why this loaded model cannot be patched, although its type can."""
    reasons, layers = [], families.layers_of(decoder)
    kinds = families.layer_kinds(decoder.config)
    own = [families.attention_of(layers[i], i) for i, kind in enumerate(kinds) if kind in families.EVICTS]
    implementation = own[0].config._attn_implementation
    if "flex" in implementation or "paged" in implementation:
        reasons.append(f"attention implementation {implementation!r} is not supported; load with 'sdpa'")
    size, heads = ranks.of(base_model(model)).size, families.heads(decoder, kinds)[1]
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


def check_type(model, decoder) -> None:
    """Raise ValueError for a model whose type was found to be wrong, or which is of an unknown type and whose output
    changes when its prompt is read in chunks."""
    top = base_model(model)
    names = top.config.model_type, decoder.config.model_type
    listed = families.is_transformers(decoder)  # remote code may use the name of a known type
    if listed and known.is_verified(*names):
        return

    @contextlib.contextmanager
    def patched(policy, options):
        _install(top, decoder, Patch(build(policy, **options), decoder, ranks.of(top)))
        try:
            yield
        finally:
            unpatch(model)

    reason = (known.refused(*names) if listed else None) or trial.difference(top, patched)
    if reason:
        raise ValueError(f"{type(top).__name__} (model_type {names[0]!r}) cannot be patched: {reason}")
