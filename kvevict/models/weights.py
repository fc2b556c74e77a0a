"""Identifies the model that computed a cache, by a hash of numbers sampled from its weights and by its
configuration."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig

RUNS, WIDTH = 16, 64  # of each tensor, RUNS runs of WIDTH numbers each are hashed
GOLDEN = 0.6180339887498949  # the fractional parts of its multiples are spread evenly over 0 .. 1
LONG = 200  # largest number of characters of a configuration's field that an error message writes out
NAMED = 4  # largest number of fields that an error message names
# Names of modules' classes, or of buffers, with tables of positions
POSITIONAL = re.compile("(?i)rotary|rope|position|inv_freq")
ADDRESS = re.compile(" at 0x[0-9a-f]+")  # the address in the repr of an object
# Fields of a configuration that do not change a model's output in eval mode; all other fields belong to its identity.
# tests/hf/test_identity.py changes each field of many families.
SILENT = {
    # where the model comes from, and how it is run
    "_auto_class", "_commit_hash", "_is_quantized", "_name_or_path", "_post_init_done", "architectures", "dtype",
    "ignore_keys_at_rope_validation", "torch_dtype", "transformers_version",
    "_attn_implementation_internal", "_experts_implementation_internal", "base_model_ep_plan", "base_model_fsdp_plan",
    "base_model_pp_plan", "base_model_tp_plan", "distributed_config",
    # which outputs a call returns
    "_output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "use_cache",
    # special tokens that begin, end or fill a text; labels
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "id2label", "label2id", "problem_type",
    # used in training only
    "activation_dropout", "attention_dropout", "attn_pdrop", "embd_pdrop", "embedding_dropout", "hidden_dropout",
    "initializer_range", "resid_pdrop", "router_aux_loss_coef",
}  # fmt: skip


class Unreadable(Exception):
    """Raised if the numbers of a weight are not in this process."""


def fingerprint(model: Any) -> str | None:
    """Return a text with the dtypes of a model's weights and a hash of numbers sampled from each weight and from each
    active adapter (PEFT). Numbers of float32 weights are rounded to bfloat16 before, so a float32 model and its
    bfloat16 copy have equal fingerprints; the device has no influence. Returns None if the numbers cannot be read, for
    example if weights are split over processes.
    """
    if (getattr(model, "tp_size", None) or 1) > 1:
        return None
    digest, dtypes = hashlib.sha256(), set()
    try:
        for weight in _weights(model):
            sample = _sampled(weight)
            dtypes.add(str(sample.dtype).removeprefix("torch."))
            digest.update(str(tuple(weight.shape)).encode() + sample.cpu().view(torch.uint8).numpy().tobytes())
    except (Unreadable, RuntimeError, NotImplementedError):  # tensors of a quantiser do not support all operations
        return None
    return f"{'+'.join(sorted(dtypes))} {digest.hexdigest()[:16]}"


class Identity(NamedTuple):
    """The facts about a model on which the keys and values of a cache depend.

    weights  the model's `fingerprint`; None: unknown
    config   {name: value} of the configuration's fields except SILENT: each value as JSON, a long one as a hash
    """

    weights: str | None
    config: dict[str, str]

    def difference(self, other: "Identity") -> str | None:
        """Describe in what two identities differ; None if no difference is known."""
        if differ(self.weights, other.weights):
            return f"its weights are {self.weights!r}, this model's {other.weights!r}"
        return _difference(self.config, other.config)


def identity(model: Any) -> Identity:
    """Return the `Identity` of a model with its present weights and configuration."""
    return Identity(fingerprint(model), _by_field(settings(model.config, adapted_in(model.modules()))))


def settings(config: Any, adapted: Iterable[Any] = ()) -> str:
    """Return, as JSON, the settings on which a model's output depends beside its weights: the fields of its
    configuration, and of configurations within it, except SILENT; and the scales of active PEFT adapters. adapted: the
    model's PEFT modules."""
    # Some kinds of adapters have no attribute `scaling`
    scaled = [each for each in adapted if isinstance(getattr(each, "scaling", None), dict)]
    scales = [_written(each.scaling[name]) for each in scaled for name in _active(each) if name in each.scaling]
    return json.dumps(_written(config) | (dict(scaling=scales) if scales else {}), sort_keys=True)


def _written(value: object) -> Any:
    """Turn a value of a configuration into one that can be written as JSON and that is equal in all processes."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, (list, tuple)):
        return [_written(each) for each in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if isinstance(value, PreTrainedConfig):
        fields = vars(value) | dict(model_type=value.model_type)  # only a loaded configuration's `vars` has model_type
        value = {name: each for name, each in fields.items() if name not in SILENT}
    elif hasattr(value, "to_dict"):  # a quantiser's settings
        value = value.to_dict()
    elif dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, dict):
        return {str(name): _written(each) for name, each in value.items()}
    return ADDRESS.sub("", str(value))


def _by_field(text: str) -> dict[str, str]:
    """Split a result of `settings` into its fields: {name: value as JSON, or a hash if that is long}."""
    found = {name: json.dumps(value, sort_keys=True) for name, value in json.loads(text).items()}
    return {
        name: value if len(value) <= LONG else f"a hash of {hashlib.sha256(value.encode()).hexdigest()[:16]}"
        for name, value in found.items()
    }


def settings_difference(one: str, other: str) -> str | None:
    """Describe the fields in which two results of `settings` differ; None if they are equal."""
    return _difference(_by_field(one), _by_field(other))


def _difference(one: dict[str, str], other: dict[str, str]) -> str | None:
    names = [name for name in sorted(one.keys() | other.keys()) if one.get(name) != other.get(name)]
    texts = [f"its {name} is {one.get(name, 'not set')}, this model's {other.get(name, 'not set')}" for name in names]
    return "; ".join([*texts[:NAMED], *([f"{len(texts) - NAMED} more fields differ"] if texts[NAMED:] else [])]) or None


def differ(one: str | None, other: str | None) -> bool:
    """Whether two fingerprints show that weights differ. False if one of them is None, or if their dtypes differ, since
    the hashes of different dtypes cannot be compared."""
    if not (isinstance(one, str) and isinstance(other, str)):
        return False
    return one.partition(" ")[0] == other.partition(" ")[0] and one != other


def adapted_in(modules: Iterable[Any]) -> list:
    """List the modules of a model that are PEFT's wrappers around other modules."""
    return [m for m in modules if "base_layer" in m._modules and hasattr(m, "active_adapters")]


def _active(module: torch.nn.Module) -> Any:
    """Return the names of a PEFT module's active adapters; () if adapters are disabled or merged into its weights."""
    return () if module.disable_adapters or module.merged else module.active_adapters


def adapters_of(module: torch.nn.Module) -> Iterator[Any]:
    """Yield (name of an adapter, module or parameter of it, whether it is active) for the adapters in a PEFT module."""
    on = _active(module)
    for child in module.children():
        if child is not module.base_layer:
            yield from ((name, part, name in on) for name, part in _own(child))


def _weights(model: torch.nn.Module) -> Iterator[Any]:
    """Yield every tensor that a model saves, except those of inactive adapters, as one or several plain tensors."""
    modules = [*model.modules()]
    if any(getattr(module, "_hf_device_mesh", None) is not None for module in modules):
        raise Unreadable  # split over ranks: even a plain tensor may be one rank's part of a weight
    for module, name, tensor in parts_of(modules):
        yield from plain_of(_offloaded(module, name) if tensor.is_meta else tensor)
    for module in modules:
        packed = getattr(module, "_weight_bias", None)  # torch.ao keeps the weight in a C++ object, not a parameter
        if packed is not None:
            yield packed()[0].int_repr()


def parts_of(modules: list, derived: bool = False) -> Iterator[Any]:
    """Yield (module, name, tensor) for every tensor that a model's modules save, except those of inactive adapters.
    derived: also yield buffers that are not saved, except tables of positions, which a forward may rewrite."""
    off = {id(part) for module in adapted_in(modules) for _, part, is_on in adapters_of(module) if not is_on}
    for module in modules:
        if id(module) in off:
            off |= {id(part) for _, part in _own(module)}
            continue
        for name, tensor in _own(module, derived):
            if isinstance(tensor, torch.Tensor) and id(tensor) not in off:
                yield module, name, tensor


def _own(module: torch.nn.Module, derived: bool = False) -> Iterator[Any]:
    """Yield (name, part) for a module's direct children, parameters and buffers, except buffers that are not saved.
    With `derived` such buffers are yielded, too, unless they are tables of positions."""
    passed = module._non_persistent_buffers_set
    if derived:
        passed = {name for name in passed if POSITIONAL.search(f"{type(module).__name__} {name}")}
    for parts in (module._modules, module._parameters, module._buffers):
        for name, part in parts.items():
            if part is not None and name not in passed:
                yield name, part


def _offloaded(module: torch.nn.Module, name: str) -> Any:
    """Return the tensor `name` of a module, which accelerate has offloaded."""
    hook = getattr(module, "_hf_hook", None)
    for one in getattr(hook, "hooks", (hook,)):
        if getattr(one, "weights_map", None) is not None:
            return one.weights_map[name]
    raise Unreadable


def plain_of(tensor: Any) -> Iterator[Any]:
    """Yield the plain tensors of which a quantiser's tensor consists; for a plain tensor, the tensor itself. For a
    tensor of bitsandbytes, which repacks its numbers when it is used, yield its scales."""
    if hasattr(tensor, "to_local"):  # a DTensor, parts of which are in other processes
        raise Unreadable
    if getattr(tensor, "quant_state", None) is not None:
        tensor = tensor.quant_state.absmax
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from plain_of(getattr(tensor, name))
    else:
        yield tensor.detach()


def _sampled(tensor: torch.Tensor) -> torch.Tensor:
    """Take RUNS * WIDTH numbers of a tensor, or all if it has fewer; float32 numbers are rounded to bfloat16."""
    flat, most = tensor.flatten(), RUNS * WIDTH
    if len(flat) > most:
        starts = (torch.arange(RUNS, dtype=torch.float64) * GOLDEN % 1 * (len(flat) - WIDTH)).long()
        flat = flat[(starts[:, None] + torch.arange(WIDTH)).flatten().to(flat.device)]
    return flat.bfloat16() if flat.dtype == torch.float32 else flat.contiguous()
