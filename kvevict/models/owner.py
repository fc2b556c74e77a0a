"""Finds out whether a model has changed since it filled a cache."""

import contextlib
import weakref
from typing import Any, NamedTuple

import torch

from . import weights
from .weights import Identity, Unreadable, adapted_in, adapters_of, identity, parts_of, plain_of, settings

RUNS, WIDTH = 16, 16  # of each tensor, RUNS runs of WIDTH numbers each are compared at the start of a turn
# Largest error of a float32 weight after adapters were merged and unmerged, relative to the maximum of its run
ROUNDED = 2**-17


class Owner:
    """Remembers the model that filled a cache. Its weights are hashed on request, which is possible as long as the
    model exists with unchanged weights, adapters and configuration."""

    def __init__(self, model: Any, known: Identity | None = None) -> None:
        self.model = (lambda: None) if model is None else weakref.ref(model)
        self.state, self.known = None if model is None else _state(model), known
        self.form = None if model is None else form(model)

    def identity(self) -> Identity | None:
        """Return the identity (hash of weights, configuration) of the model that filled the cache; None if no model
        did. Raises ValueError if it was not computed before the model was changed or deleted."""
        if self.known is None and self.state is not None:
            model = self.model()
            reason = "that is gone" if model is None else self._change(model)
            if reason is not None:
                raise ValueError(
                    f"this cache was filled by a model {reason}: save it while that model has the weights and PEFT "
                    "adapters that read it, or read the text again"
                )
            self.known = identity(model)
        return self.known

    def difference(self, model: Any, thorough: bool = True) -> str | None:
        """Describe how `model` differs from the model that filled the cache, in words that can follow "the model"; None
        if no difference is found. With thorough=False, if both are the same object, only its PEFT adapters are checked,
        in about a microsecond each."""
        if self.model() is not model:
            with contextlib.suppress(ValueError):  # raised if the model that filled the cache is gone or has changed
                known = self.identity()
                differs = known and known.difference(identity(model))
                return differs and f": {differs}"
        elif not thorough and all(module() and _switches(module()) == was for module, was in self.state.switches):
            return None
        change = self._change(model)
        return change and f", {change}"

    def agrees(self, other: "Owner") -> bool:
        """Whether the two caches of these owners were filled by one model object, with equal weights."""
        one, two = self.state, other.state
        if self is other or self.model() is not other.model() or one is None or two is None:
            return self.model() is other.model()
        return _change(one, two) is None and _change(two, one) is None

    def _change(self, model: Any) -> str | None:
        before: Any = self.state
        if self.model() is not model:
            before = before._replace(versions={})  # its keys are ids of tensors, which new tensors may have by now
        return _change(before, _state(model))

    def __deepcopy__(self, memo: dict) -> "Owner":
        return self

    def __reduce__(self) -> Any:
        return Owner, (None, self.identity())


def form(model: torch.nn.Module) -> tuple[torch.dtype, torch.device]:
    """Return the dtype and the device of a model's first weight."""
    weight = next(model.parameters())
    return weight.dtype, weight.device


class _State(NamedTuple):
    """Facts about a model that change if its weights, buffers or configuration change, or if its adapters are switched
    on, off or merged."""

    switches: list  # (weak reference to a PEFT module, its `_switches`) for each PEFT module
    on: list  # for each PEFT module with active adapters, the set of their names
    versions: dict  # id of a tensor -> its `_version`, which counts most writes to the tensor
    names: list  # names of the sampled tensors
    # (device, dtype, length of a run, whether adapters merge into the tensors) -> bytes of numbers sampled from these
    # tensors; {} if they cannot be read
    sample: dict
    settings: str  # result of `weights.settings` for its configuration


def _state(model: Any) -> _State:
    modules = [*model.modules()]
    adapted = adapted_in(modules)
    switches = [(weakref.ref(module), _switches(module)) for module in adapted]
    on = [frozenset(name for name, _, is_on in adapters_of(module) if is_on) for module in adapted]
    # Tensors on the device "meta" are offloaded ones, which are not written to
    parts = [each for each in parts_of(modules, derived=True) if not each[2].is_meta]
    versions = {id(part): 0 if part.is_inference() else part._version for _, _, part in parts}
    split = (getattr(model, "tp_size", None) or 1) > 1  # tensor parallel: samples could make ranks decide differently
    sample = {} if split else _sample(parts, {id(module.base_layer) for module in adapted})
    names = [name for _, name, _ in parts]
    return _State(switches, [*filter(None, on)], versions, names, sample, settings(model.config, adapted))


def _switches(module: Any) -> tuple:
    return tuple(module.active_adapters), module.disable_adapters, module.merged


def _sample(parts: list, merging: set[int]) -> dict:
    """Make `_State.sample`: runs of numbers of each tensor, at even distances; {} if a tensor cannot be read. All
    numbers of one device are copied to the host at once. merging: ids of the modules into which adapters may be
    merged."""
    runs: dict = {}
    found = {}
    with contextlib.suppress(Unreadable, RuntimeError, NotImplementedError):  # as in `weights.fingerprint`
        for module, _, part in parts:
            for tensor in plain_of(part):
                run = _runs(tensor)
                runs.setdefault((run.device, run.dtype, run.shape[1], id(module) in merging), []).append(run)
        for device in {key[0] for key in runs}:
            own = {key: torch.cat(runs[key]).view(torch.uint8).flatten() for key in runs if key[0] == device}
            each = torch.cat([*own.values()]).cpu().split([len(numbers) for numbers in own.values()])
            found |= {key: numbers.numpy().tobytes() for key, numbers in zip(own, each, strict=True)}
        return found
    return {}


def _runs(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view [RUNS, WIDTH] of a tensor's storage: RUNS runs at even distances, from its first number to its
    last. A tensor of n <= RUNS * WIDTH numbers gives a view [1, n] of all of them."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    span = tensor.numel() if tensor.is_contiguous() else 1 + sum((size - 1) * step for size, step in steps)
    if span <= RUNS * WIDTH:
        return tensor.as_strided((1, span), (1, 1))
    return tensor.as_strided((RUNS, WIDTH), ((span - WIDTH) // (RUNS - 1), 1))


def _change(before: _State, now: _State) -> str | None:
    """Describe how a model has changed between two states; None if no change is found."""
    if now.on != before.on:
        was, are = (", ".join(sorted(frozenset().union(*each.on))) or "none" for each in (before, now))
        return f"whose PEFT adapters on were {was}, this one's are {are}"
    written = any(version > before.versions.get(part, version) for part, version in now.versions.items())
    if written or (before.sample and now.sample and not _alike(before, now)):
        return "whose weights were written to since"
    if now.settings != before.settings:
        return f"whose configuration was another: {weights.settings_difference(before.settings, now.settings)}"
    return None


def _alike(before: _State, now: _State) -> bool:
    """Whether the sampled numbers of two states are equal, except for the rounding of weights into which adapters were
    merged, and unmerged again."""
    if before.names != now.names or before.sample.keys() != now.sample.keys():
        return False
    return all(_near(held, now.sample[key], *key[1:]) for key, held in before.sample.items())


def _near(one: bytes, other: bytes, dtype: torch.dtype, width: int, merges: bool) -> bool:
    if one == other or not (merges and dtype.is_floating_point and len(one) == len(other)):
        return one == other
    before, now = (torch.frombuffer(bytearray(each), dtype=dtype).view(-1, width).float() for each in (one, other))
    most = before.abs().amax(1, keepdim=True) * max(4 * torch.finfo(dtype).eps, ROUNDED)
    return bool(((now - before).abs() <= most).all())
