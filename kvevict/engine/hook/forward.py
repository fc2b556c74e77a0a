"""Stand-ins for the forwards of the text decoder and of the model around it, with their installation and removal. A
call of the decoder runs in a copy of the context (contextvars), so its changes to the context end with the call, also
after an error."""

import contextvars
import functools
import inspect
import warnings
from collections.abc import Callable, Generator, Iterable
from typing import Any

import torch
from transformers.cache_utils import Cache

from ... import cautions
from ...context import context, current, enter, within
from ...models import compat, rotary
from ...models.compat import STATE
from ...models.families import find_decoder
from ...ops import few_rows
from ..memory.cache import EvictionCache
from ..read.plan import Plan
from ..read.spans import Spans
from ..read.step import OuterCall, Step
from .ahead import Generation, checking
from .arguments import Arguments
from .standin import NO_RECORD, UNTRACED, WRAPPED, StandIn, replace, restore


def install(decoder: torch.nn.Module) -> None:
    """Replace the decoder's forward; if the rotary frequencies depend on a prompt's length, also replace the forward of
    its rotary embedding."""
    replace(decoder, forward)
    if rotary.rope_depends_on_length(decoder):
        replace(rotary.rotary_of(decoder), _rotary_forward)


def install_around(top: torch.nn.Module) -> None:
    """Replace methods of the model around a decoder, unless they are replaced already: its forward, its methods named
    in `STAND_INS`, and the forwards of the linear layers that `few_rows` can compute."""
    if WRAPPED not in top.__dict__:
        replace(top, _top_forward)
        for module in filter(few_rows.is_product, top.modules()):
            if WRAPPED not in module.__dict__:
                replace(module, few_rows.forward)
    for name, function in STAND_INS.items():
        before = top.__dict__.get(name)
        if hasattr(type(top), name) and not isinstance(before, StandIn):
            top.__dict__[name] = StandIn(function, top, name, before)


def remove(decoder: torch.nn.Module, tops: Iterable[torch.nn.Module]) -> None:
    """Restore the methods that `install` and `install_around` replaced in a decoder, its rotary embedding and the
    models `tops` around it."""
    for module in (decoder, rotary.rotary_of(decoder), *tops):
        if module is not None and WRAPPED in module.__dict__:
            restore(module)
    for module in (each for top in tops for each in top.modules()):
        if WRAPPED in module.__dict__ and module.__dict__[WRAPPED].function is few_rows.forward:
            restore(module)
    for top in tops:
        for name in STAND_INS:
            standin = top.__dict__.get(name)
            if isinstance(standin, StandIn):
                del top.__dict__[name]
                top.__dict__.update({} if standin.before is None else {name: standin.before})


def _generate(self: torch.nn.Module, run: Callable, *args: object, **kwargs: Any) -> object:
    """Stand in for `run`, the model's `generate`: use one policy from its first token to its last."""
    decoder = find_decoder(self)
    installed = decoder.__dict__.get(STATE)
    plan = None if installed is None else installed.chosen()
    if plan is None or not installed.enter(decoder):
        return run(*args, **kwargs)
    before, kwargs = plan.meter(), compat.named(kwargs)
    cache = kwargs.get(compat.CACHE)
    try:
        if isinstance(cache, EvictionCache) and cache.sequence.columns and not cache.sequence.half_read:
            cache.record_past = False  # from now on tokens of earlier calls cannot be taken back
            _check_after(cache.sequence.columns, *args, **kwargs)
        with within(plans={**context().plans, installed: plan}), checking(plan, Generation()):
            output = run(*args, **kwargs)
    finally:
        installed.leave(decoder)
    if plan.meter() is not before:
        cautions.of_share(plan.meter(), plan.policy, plan.policy.question)
    return output


def _check_after(
    held: int,
    inputs: object = None,
    *_: object,
    input_ids: object = None,
    attention_mask: torch.Tensor | None = None,
    **others: object,
) -> None:
    """Raise ValueError if the prompt of a `generate` call is not longer than the `held` tokens that the given cache
    has read. New tokens alone are allowed with an attention_mask that covers the held and the new tokens."""
    ids, mask = input_ids if inputs is None else inputs, attention_mask
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or ids.shape[1] > held:
        return
    if mask is None or mask.shape[-1] < held + ids.shape[1]:
        raise ValueError(
            f"the prompt has {ids.shape[1]} tokens, no more than the {held} that the cache holds: give the whole chat, "
            "which begins with these, or new tokens and an attention_mask that covers both; to answer a turn anew, "
            "fork the cache before it"
        )


def _top_forward(self: torch.nn.Module, run: Callable, *args: Any, **kwargs: Any) -> object:
    """Stand in for `run`, the forward of the model around the decoder."""
    if compat.takes(getattr(run, "__func__", run), compat.CACHE):  # a model of remote code may use another name
        kwargs = compat.named(kwargs)
    wanted, ids = kwargs.get("logits_to_keep", 0), args[0] if args else kwargs.get("input_ids")
    wanted = wanted if isinstance(wanted, int) and kwargs.get("labels") is None else 0
    ahead = context().ahead
    if ahead is not None and len(args) < 2 and ahead.takes(ids, kwargs):
        others = {name: value for name, value in kwargs.items() if name != "input_ids"}
        return ahead.answer(functools.partial(_top_forward, self, run), ids, others)
    call = OuterCall(self, kwargs.get("attention_mask"), wanted)
    with within(outer=call, few_rows=few_rows.has_few(self, ids, kwargs.get("inputs_embeds"))):
        output = run(*args, **kwargs)
    spans, call.spans = call.spans, None  # a reference cycle would keep the cache's memory alive
    if spans is not None:
        spans.settle()
    return output


def forward(self: torch.nn.Module, run: Callable, *args: Any, **kwargs: Any) -> Any:
    """Stand in for `run`, the decoder's forward: take the same arguments and return the same kind of output."""
    ready = context().ready
    if ready is not None and ready[0] is self:
        return ready[1]
    installed = self.__dict__.get(STATE)
    plan = None if installed is None else installed.chosen()
    if plan is None or not installed.enter(self):
        return run(*args, **kwargs)
    try:
        return _forward(self, run, plan, args, kwargs)
    finally:
        installed.leave(self)


def _forward(self: torch.nn.Module, run: Callable, plan: Plan, args: tuple, kwargs: dict) -> Any:
    """Run the decoder with the policy of `plan`; while the decoder trains or uses no cache, call its original forward
    `run`."""
    if args:
        bound = inspect.signature(type(self).forward).bind_partial(self, *args).arguments
        kwargs |= {name: value for name, value in bound.items() if name != "self"}
    kwargs = compat.named(kwargs)
    use_cache, cache = kwargs.get("use_cache"), kwargs.get(compat.CACHE)
    if use_cache is None:
        use_cache = getattr(self.config, "use_cache", True)
        if not (use_cache or self.training or cache is not None):
            warnings.warn(
                "config.use_cache is False, as a Trainer with checkpointing leaves it, so nothing is evicted: set "
                "model.config.use_cache = True, or pass use_cache=",
                stacklevel=2,
            )
    if self.training or (cache is None and not use_cache):
        return run(**kwargs)
    if torch.jit.is_tracing():
        raise ValueError(NO_RECORD)
    with torch.no_grad():
        arguments, output = contextvars.copy_context().run(_read, self, run, plan, kwargs)
    if torch.is_grad_enabled():
        anchors = kwargs.get("inputs_embeds"), *self.parameters()
        if any(each is not None and each.requires_grad for each in anchors):
            output.last_hidden_state.requires_grad_().register_hook(_refuse_backward)
    return output if arguments.return_dict is not False else output.to_tuple()


def _read(decoder: torch.nn.Module, run: Callable, plan: Plan, kwargs: dict) -> tuple[Arguments, Any]:
    """Read all tokens of a call of the decoder; return the call's `Arguments` and the decoder's output."""
    arguments = Arguments(decoder, plan, kwargs)
    spans = Spans(arguments, run)
    for _ in spans.steps():
        pass
    arguments.packing.unpack(spans.output)
    if arguments.top is None:
        spans.settle()
    else:
        arguments.outer.spans = spans  # `_top_forward` calls their `settle` once the model's call has ended
    return arguments, spans.output


def reading(top: torch.nn.Module, ids: torch.Tensor, cache: Cache | None) -> Generator[Step, None, Any]:
    """Read a prompt's ids [B, N] into a cache, as the call `top(ids)` does, without gradients. Yields the `Step` of
    each chunk but the last after the chunk is read, so that the caller can work between chunks. Returns the model's
    output, with the logits of the last token."""
    decoder, inside = find_decoder(top), contextvars.copy_context()
    given = {"input_ids": ids, compat.CACHE: cache, "use_cache": True, "return_dict": True}

    def begin() -> Spans:
        enter(outer=OuterCall(top, None, 1))
        return Spans(Arguments(decoder, decoder.__dict__[STATE].chosen(), given), decoder.__dict__[WRAPPED].own)

    with torch.no_grad():
        spans = inside.run(begin)
        steps = spans.steps()
        while (step := inside.run(next, steps, None)) is not None:
            if step.ahead:
                yield step
        with within(ready=(decoder, spans.output)):
            output = top(**given, logits_to_keep=1)
        spans.settle()
    return output


def _rotary_forward(
    self: torch.nn.Module, run: Callable, x: torch.Tensor, position_ids: torch.Tensor, *args: object, **kwargs: object
) -> tuple:
    """Stand in for `run`, a rotary embedding's forward, so that each chunk gets the frequencies of the full prompt:
    append the prompt's last position to the chunk's, and drop that position's cos and sin from the result."""
    step = current()
    if step is None or step.final_position is None:
        return run(x, position_ids, *args, **kwargs)
    final = position_ids.new_full((*position_ids.shape[:-1], 1), step.final_position)
    cos, sin = run(x, torch.cat([position_ids, final], -1), *args, **kwargs)
    return cos[:, :-1], sin[:, :-1]


def _refuse_backward(grad: torch.Tensor) -> None:
    """Backward hook of the decoder's output: raise RuntimeError, since the decoder was run without gradients and they
    would silently be missing."""
    raise RuntimeError(
        "attention over an evicted cache has no gradient; call model.train(), pass use_cache=False, or "
        "kvevict.unpatch(model) before training"
    )


def _when_patched(function: Callable, model: torch.nn.Module, run: Callable, *args: object, **kwargs: object) -> Any:
    """Call `function`, which stands in for a method of the model, if the present call has a policy; otherwise call the
    original method `run`."""
    installed = find_decoder(model).__dict__.get(STATE)
    patched = installed is not None and installed.chosen() is not None
    return function(model, run, *args, **kwargs) if patched else run(*args, **kwargs)


UNTRACED.update({forward: True, _top_forward: False})
# {method name: stand-in for this method of the model around the decoder}
STAND_INS: dict[str, Callable] = {
    name: functools.partial(_when_patched, function) for name, function in compat.STAND_INS.items()
}
STAND_INS["generate"] = _generate
