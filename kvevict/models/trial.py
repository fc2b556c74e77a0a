"""Runs a model on a few tokens to find out facts that its structure does not show: whether reading a prompt in chunks
changes its output, whether its layers rotate queries and keys as expected, and which submodule of a layer gets the
residual stream after attention's output is added."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn import Module

from ..engine.hook import installed
from ..engine.memory.cache import EvictionCache
from . import families, rotary
from .compat import CACHE, cache_of

# Numbers of columns of the prompt, of tokens decoded after it, and of padding columns of the second row
SEEN, NEW, PAD = 24, 2, 3
FAR = 100_000  # the highest position at which rotation is tested
TOLERANCE = {torch.float32: 5e-5}  # dtype of the output -> allowed relative error in the 2-norm
ROUNDED = 5e-2  # allowed relative error of all other dtypes, and with quantised weights

_known = WeakKeyDictionary()  # decoder -> {function of this file: what it found for the decoder}


@contextlib.contextmanager
def quiet(model: Module) -> Iterator[None]:
    """Switch the model's dropout and the recording of gradients off during this block."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def difference(model: Module, patched: Callable[[str, dict], AbstractContextManager]) -> str | None:
    """Describe how the output of a model of unknown type changes if its prompt is read in chunks; None if it does not
    change. patched: a function of a policy's name and options that returns a context manager, in which the model is
    patched."""
    try:
        ids = plain_ids(model.config, 2, SEEN + NEW)
        mask = torch.ones_like(ids)
        mask[1, :PAD] = 0
        device = families.device_of(model)
        ids, mask = ids.to(device), mask.to(device)
        valid = mask.bool()
        with quiet(model):
            want = _rows(model(input_ids=ids, attention_mask=mask, use_cache=False))[valid]
    except Exception as error:
        return f"it does not run on token ids alone ({type(error).__name__}: {error})"
    try:
        with quiet(model), patched("take", dict(budget=SEEN - 1, chunk_size=7, probe=4, ema_alpha=0.0)):
            part = valid[:, :SEEN]
            read = _rows(model(input_ids=ids[:, :SEEN], attention_mask=mask[:, :SEEN], use_cache=True))[part]
        with quiet(model), patched("snapkv", dict(budget=4 * SEEN, chunk_size=7)):
            said, cache = _in_calls(model, ids, mask, range(SEEN, SEEN + NEW + 1))
        if not isinstance(cache, EvictionCache):
            return "its cache is not filled by its text decoder"
        got = said[valid]
        place = (valid.flatten().cumsum(0) - 1).view(valid.shape)  # number of each valid token, counted row by row
        prompt = place[:, :SEEN][part]
        errors = {"rows appended to a chunk": _error(read, want[prompt]), "chunks": _error(got, want)}
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    # The rounding in products with quantised weights depends on the number of rows.
    quantised = any(not p.is_floating_point() or hasattr(p, "__tensor_flatten__") for p in model.parameters())
    limit = ROUNDED if quantised else TOLERANCE.get(want.dtype, ROUNDED)
    wrong = [f"{what} change its output by {error:.0e}" for what, error in errors.items() if not error < limit]
    if not wrong:
        return None
    return itself(model, ids, mask, want, limit) or "; ".join(wrong)


def itself(
    model: Module, input_ids: torch.Tensor, attention_mask: torch.Tensor, want: torch.Tensor, limit: float
) -> str | None:
    """Describe how the unpatched model's output for input_ids [B, N] changes if they are read in two calls with its
    default cache, not in one; None if it does not change. want: logits or hidden states of the valid tokens, read in
    one call; limit: the relative error up to which outputs count as equal."""
    try:
        with quiet(model):
            said, _ = _in_calls(model, input_ids, attention_mask, (SEEN, input_ids.shape[1]))
        error = _error(said[attention_mask.bool()], want)
    except Exception as error:
        return f"the unpatched model cannot be run in two calls either ({type(error).__name__}: {error})"
    return (
        None if error < limit else f"the unpatched model's output in two calls differs from that in one by {error:.0e}"
    )


def plain_ids(config: Any, batch: int, length: int) -> torch.Tensor:
    """Draw random token ids [batch, length] among those that the config does not name as special tokens."""
    text = config.get_text_config(decoder=True)
    special = {value for each in (config, text) for name, value in vars(each).items() if name.endswith("token_id")}
    plain = [token for token in range(5, min(text.vocab_size, 1000)) if token not in special]
    chosen = torch.randint(len(plain), (batch, length), generator=torch.Generator().manual_seed(0))
    return torch.tensor(plain)[chosen]


def _in_calls(model: Module, ids: torch.Tensor, mask: torch.Tensor, ends: Iterable[int]) -> tuple:
    """Read ids [B, N] in several calls, each up to the next column in `ends`. Returns the outputs of all calls,
    concatenated, and the last cache."""
    said, cache, start = [], None, 0
    for end in ends:
        out = model(input_ids=ids[:, start:end], attention_mask=mask[:, :end], **{CACHE: cache}, use_cache=True)
        cache, start = cache_of(out), end
        said.append(_rows(out))
    return torch.cat(said, 1), cache


def _rows(out: Any) -> torch.Tensor:
    return out.logits if getattr(out, "logits", None) is not None else out[0]


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.float() - want.float()).norm() / want.float().norm()).item()


def _found(find: Callable[[Module, Module], dict | str], model: Module, decoder: Module, advice: str) -> dict:
    """Return what find(model, decoder) returns; it is called once for a decoder. If the result is a text, it is the
    reason why nothing was found: raise ValueError with the text and the advice."""
    known = _known.setdefault(decoder, {})
    if find not in known:
        known[find] = find(model, decoder)
    if isinstance(known[find], str):
        raise ValueError(f"{known[find]}{advice}")
    return known[find]


# -- rotation ----------------------------------------------------------------------------------------------------------


def rotating(model: Module, decoder: Module) -> dict[int, bool]:
    """Find out, for each layer that evicts, whether it rotates queries and keys by their positions: {layer: bool}.

    Every attention module gets two equal rows at two positions, so the two queries differ by the rotation only, and so
    do the two keys. Raises ValueError if they differ, but not by the rotation that `rotary.rotate` computes.
    """
    return _found(
        _rotating, model, decoder, "; kvevict cannot rotate its queries or keys: pass ema_alpha=0.0 with rows='probe', "
        "and no score that rotates them (compactor, expected)",
    )  # fmt: skip


def _here(hook: Callable) -> Callable:
    """Return `hook`, restricted to calls of the model in the present thread."""
    thread = threading.get_ident()

    def own(*args: object) -> object:
        return hook(*args) if threading.get_ident() == thread else None

    return own


def _rotating(model: Module, decoder: Module) -> dict | str:
    config, seen = decoder.config, {}
    last = min(FAR, *(getattr(config, name, None) or FAR for name in (
        "max_position_embeddings", "original_max_position_embeddings"))) - 1  # fmt: skip
    device = families.device_of(decoder)
    positions = torch.tensor([[min(5, last - 1), last]], device=device)
    modules = families.attentions(decoder, families.evicting(config))

    def alike(module: Module, args: tuple, kwargs: dict) -> tuple:
        if args:
            return (args[0][:, :1].expand_as(args[0]).contiguous(), *args[1:]), kwargs
        rows = kwargs["hidden_states"]
        return args, kwargs | dict(hidden_states=rows[:, :1].expand_as(rows).contiguous())

    def note(module: Module, query: torch.Tensor, key: torch.Tensor) -> None:
        seen[module.layer_idx] = query.float(), key.float()

    with quiet(model), contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(module.register_forward_pre_hook(_here(alike), with_kwargs=True))
        with installed.overheard(model, decoder, note):
            try:
                decoder(input_ids=positions.clamp_max(1) + 4, position_ids=positions, use_cache=False)
            except Exception as error:
                return f"how its queries are rotated cannot be seen ({type(error).__name__}: {error})"
        rotates = {}
        for module in modules:
            try:
                rotates[module.layer_idx] = _is_rotated(decoder, module, positions, *seen[module.layer_idx])
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                return f"layer {module.layer_idx}'s queries are rotated in an unknown way ({reason})"
    return rotates


def _is_rotated(decoder: Module, module: Module, positions: torch.Tensor, *pair: torch.Tensor) -> bool:
    """Whether an attention module rotates its queries and keys. pair: the module's queries and keys [1, heads, 2, D] of
    two equal rows at `positions` [1, 2]. Raises ValueError if the two rows differ, but not by `rotary.rotate`."""
    if all(torch.equal(x[:, :, 0], x[:, :, 1]) for x in pair):
        return False
    exact = next((weight.dtype for weight in module.parameters()), None) == torch.float32
    for x in pair:
        if not x.isfinite().all():
            raise ValueError("they are not finite: load the model in bfloat16 or float32")
        rotated = rotary.rotate(decoder, module, x[:, :, :1], positions[:, 0], positions[:, 1])
        error = _error(rotated, x[:, :, 1:])
        if not error < (TOLERANCE[torch.float32] if exact else ROUNDED):
            raise ValueError(f"off by {error:.0e}")
    return True


# -- residual stream ---------------------------------------------------------------------------------------------------


def after_attention(model: Module, decoder: Module) -> dict[int, str]:
    """Find, for each layer that evicts, the submodule whose input is the residual stream after attention's output was
    added: {layer: name of the submodule}. It is recognised by its input, which equals the layer's input if attention's
    output is set to 0, and differs otherwise. Raises ValueError if a layer has no such submodule (for example because
    its attention and MLP run in parallel)."""
    return _found(_after_attention, model, decoder, ": give the layer budget cd='layer' or cd='off'")


def _after_attention(model: Module, decoder: Module) -> dict | str:
    ids = plain_ids(decoder.config, 2, 4).to(families.device_of(decoder))
    layers, order = families.layers_of(decoder), families.evicting(decoder.config)
    entered, inputs = {}, {}

    def enter(index: int) -> Callable:
        return lambda module, args, kwargs: entered.update({index: args[0] if args else kwargs["hidden_states"]})

    def child(index: int, name: str) -> Callable:
        def note(module: Module, args: tuple) -> None:
            if args and isinstance(args[0], torch.Tensor) and (index, name) not in inputs:
                alike = args[0].numel() == entered[index].numel()  # compared by size, as OPT's MLPs get [B * T, E]
                inputs[index, name] = alike and _error(args[0].reshape(entered[index].shape), entered[index])

        return note

    def nothing(module: Module, args: tuple, output: tuple) -> tuple:
        return tuple(0 * x if i == 0 else x for i, x in enumerate(output)) if isinstance(output, tuple) else 0 * output

    def same(silent: bool) -> set:
        """Find the submodules (layer, name) whose input equals their layer's input. silent: set attention's output to
        0."""
        inputs.clear()
        with quiet(model), contextlib.ExitStack() as stack:
            for index in order:
                hooks = [layers[index].register_forward_pre_hook(_here(enter(index)), with_kwargs=True)]
                children = layers[index].named_children()
                hooks += [m.register_forward_pre_hook(_here(child(index, name))) for name, m in children]
                if silent:
                    hooks.append(families.attention_of(layers[index], index).register_forward_hook(_here(nothing)))
                for hook in hooks:
                    stack.enter_context(hook)
            decoder(input_ids=ids, use_cache=False)
        return {key for key, error in inputs.items() if error is not False and error < 1e-6}

    try:
        with_attention, without = same(False), same(True)
    except Exception as error:
        return f"what its layers add cannot be seen ({type(error).__name__}: {error})"
    found = {}
    for index in order:
        name = next((n for n, _ in layers[index].named_children()
                     if (index, n) in without and (index, n) not in with_attention), None)  # fmt: skip
        if name is None:
            return f"no part of layer {index} gets the residual stream with only the attention's output added"
        found[index] = name
    return found
