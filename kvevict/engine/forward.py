"""What stands in for the text decoder's forward, how it is put there and taken away."""

import inspect
import types

import torch

from .. import families
from .reader import Reader
from .request import Request
from .step import STATE, current

WRAPPED = "_kvevict_forward"  # module attribute: (name of the attribute we replaced, what was there or None)


def install(decoder) -> None:
    """Replace the decoder's forward, and that of rotary frequencies which depend on a prompt's length."""
    replace(decoder, forward)
    if families.rope_depends_on_length(decoder):
        replace(families.rotary_of(decoder), _rotary_forward)


def remove(decoder) -> None:
    restore(decoder)
    if families.rope_depends_on_length(decoder):
        restore(families.rotary_of(decoder))


def replace(module, function) -> None:
    """Put a bound method (deepcopy rebinds those) where accelerate looks when it has hooked the module already."""
    name = "_old_forward" if "_old_forward" in module.__dict__ else "forward"
    object.__setattr__(module, WRAPPED, (name, module.__dict__.get(name)))
    setattr(module, name, types.MethodType(function, module))


def restore(module) -> None:
    name, before = getattr(module, WRAPPED)
    if "_old_forward" in module.__dict__ and name == "forward":  # accelerate hooked us after patching
        name = "_old_forward"
    if before is None and name == "forward":
        del module.__dict__[name]
    else:
        setattr(module, name, before or types.MethodType(type(module).forward, module))
    object.__delattr__(module, WRAPPED)


def original(module):
    """The module's own forward, as a callable."""
    return getattr(module, WRAPPED)[1] or types.MethodType(type(module).forward, module)


@torch.compiler.disable
def forward(self, *args, **kwargs):
    """Stands in for the decoder's forward; same arguments, same result."""
    run = original(self)
    if args:
        bound = inspect.signature(type(self).forward).bind_partial(self, *args).arguments
        kwargs |= {name: value for name, value in bound.items() if name != "self"}
    use_cache = kwargs.get("use_cache")
    use_cache = getattr(self.config, "use_cache", True) if use_cache is None else use_cache
    cache = kwargs.get("past_key_values")
    if self.training or (cache is None and not use_cache):
        return run(**kwargs)
    with torch.no_grad():
        request = Request(self, self.__dict__[STATE], kwargs)
        reader = Reader(request, run)
        if request.tokens == 1 and request.columns > 0:
            output = reader.decode()
        elif request.rolls_back and request.columns > 0 and request.wanted == request.tokens:
            output = reader.append()
        else:
            output = reader.read()
    if torch.is_grad_enabled():
        _refuse_backward(self, kwargs.get("inputs_embeds"), output)
    return output if request.return_dict is not False else output.to_tuple()


def _rotary_forward(self, x, position_ids, *args, **kwargs):
    """Frequencies of a whole prompt for each of its chunks: the prompt's last position comes along and is dropped."""
    step = current()
    run = original(self)
    if step is None or step.final_position is None:
        return run(x, position_ids, *args, **kwargs)
    final = position_ids.new_full((*position_ids.shape[:-1], 1), step.final_position)
    cos, sin = run(x, torch.cat([position_ids, final], -1), *args, **kwargs)
    return cos[:, :-1], sin[:, :-1]


class _NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, anchor):
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError(
            "attention over an evicted cache has no gradient; call model.train(), pass use_cache=False, or "
            "kvevict.unpatch(model) before training"
        )


def _refuse_backward(decoder, embeds, output) -> None:
    """Make a result's backward pass an error, instead of silently lacking the decoder's gradients."""
    inputs = [] if embeds is None else [embeds]
    anchor = next((p for p in (*inputs, *decoder.parameters()) if p.requires_grad), None)
    if anchor is not None:
        output.last_hidden_state = _NoBackward.apply(output.last_hidden_state, anchor)
