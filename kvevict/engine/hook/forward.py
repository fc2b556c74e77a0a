"""Replacements for the forwards of the text decoder and of the model around it; their installation and removal. Each
call runs in a new context (contextvars), so its notes there are gone however it ends."""

import contextvars
import functools
import inspect
import types
import warnings
from collections.abc import Callable, Generator, Iterable
from typing import Any

import torch

from ... import cautions
from ...context import context, current, enter, within
from ...models import compat, rotary
from ...models.compat import STATE
from ...models.families import find_decoder
from ...ops import few_rows
from ..memory.cache import EvictionCache
from ..read.spans import Spans
from ..read.step import OuterCall, Step
from .arguments import Arguments

WRAPPED = "_kvevict_forward"  # module attribute: the StandIn of its forward
NO_RECORD = (
    "torch.export and torch.jit.trace record the operations of one call, and a patched model's differ from call to "
    "call: record it after kvevict.unpatch(model), or use torch.compile"
)


class StandIn:
    """A function in place of a module's method. A copy or pickle of the module gets a separate one.

    before   the module's previous attribute of that name; None: the class's method
    """

    def __init__(self, function: Any, module: torch.nn.Module, name: str, before: Any = None) -> None:
        self.function, self.module, self.name, self.before = _untraced(function), module, name, before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function = self.function
        if function is None or (function is few_rows.forward and torch.compiler.is_compiling()):
            # Unpatched, but a wrapper made earlier still calls it; or traced, by what does not take `own`.
            return self.before(*args, **kwargs) if self.before else self._of_class(self.module, *args, **kwargs)
        if torch.compiler.is_exporting():
            raise ValueError(NO_RECORD)
        return function(self.module, self.own, *args, **kwargs)

    def __getstate__(self) -> dict:
        """State with the plain function: a wrapper cannot be pickled."""
        return self.__dict__ | dict(function=self.function and inspect.unwrap(self.function))

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self.function = _untraced(self.function)

    @property
    def own(self) -> Callable[..., Any]:
        """The original method."""
        return self.before or types.MethodType(self._of_class, self.module)

    @property
    def _of_class(self) -> Callable[..., Any]:
        return getattr(type(self.module), self.name.removeprefix("_old_"))

    @property
    def __signature__(self) -> Any:
        return inspect.signature(self.own)

    @property
    def __code__(self) -> Any:
        return self.own.__code__  # torch.export looks at it


def install(decoder: torch.nn.Module) -> None:
    """Replace the decoder's forward, and its rotary embedding's if the frequencies depend on a prompt's length."""
    replace(decoder, forward)
    if rotary.rope_depends_on_length(decoder):
        replace(rotary.rotary_of(decoder), _rotary_forward)


def install_around(top: torch.nn.Module) -> None:
    """Replace the forward of the model around a decoder, of its `few_rows` modules and some of its methods, unless
    already replaced."""
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
    """Restore the forwards and methods of a decoder, its rotary embedding and the models around it."""
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


def replace(module: torch.nn.Module, function: Callable[..., Any]) -> None:
    """Put a stand-in in place of forward; in a module that accelerate has hooked, of `_old_forward`."""
    name = "_old_forward" if "_old_forward" in module.__dict__ else "forward"
    standin = StandIn(function, module, name, module.__dict__.get(name))
    object.__setattr__(module, WRAPPED, standin)
    setattr(module, name, standin)


def restore(module: torch.nn.Module) -> None:
    standin = getattr(module, WRAPPED)
    object.__delattr__(module, WRAPPED)
    standin.function = None
    name = standin.name
    if module.__dict__.get("_old_forward") is standin:  # accelerate may have hooked us after patching
        name = "_old_forward"
    if module.__dict__.get(name) is standin:
        setattr(module, name, standin.own)
        if standin.before is None and name == "forward":
            del module.__dict__[name]


def _untraced(function: Any) -> Any:
    """Tell torch.compile to leave a stand-in out of its graphs: `forward` with all that it calls, `_top_forward` alone.
    Decorators would import Dynamo with the package."""
    return _disabled(function) if function in (forward, _top_forward) else function


@functools.cache
def _disabled(function: Any) -> Any:
    return torch.compiler.disable(function, recursive=function is forward)


def _generate(self: torch.nn.Module, run: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Stands in for the model's `generate`: one policy holds from its first token to its last."""
    decoder = find_decoder(self)
    installed = decoder.__dict__.get(STATE)
    plan = None if installed is None else installed.chosen()
    if plan is None or not installed.enter(decoder):
        return run(*args, **kwargs)
    before, kwargs = plan.meter(), compat.named(kwargs)
    cache = kwargs.get(compat.CACHE)
    try:
        if isinstance(cache, EvictionCache) and cache.sequence.columns and not cache.sequence.half_read:
            cache.record_past = False  # an earlier call's assistant cannot take its tokens back any more
            _check_after(cache.sequence.columns, *args, **kwargs)
        with within(plans={**context().plans, installed: plan}):
            output = run(*args, **kwargs)
    finally:
        installed.leave(decoder)
    if plan.meter() is not before and plan.policy.question == "later":
        cautions.of_text(plan.meter(), plan.policy.budget, 4)
    return output


def _check_after(
    held: int, inputs: Any = None, *_: object, input_ids: Any = None, attention_mask: Any = None, **others: object
) -> None:
    """Raise ValueError for a prompt of a `generate` that has nothing after the `held` tokens of its cache: Transformers
    would read it after these."""
    ids, mask = input_ids if inputs is None else inputs, attention_mask
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or ids.shape[1] > held:
        return
    if mask is None or mask.shape[-1] < held + ids.shape[1]:
        raise ValueError(
            f"the prompt has {ids.shape[1]} tokens, no more than the {held} that the cache holds: give the whole chat, "
            "which begins with these, or new tokens and an attention_mask that covers both; to answer a turn anew, "
            "fork the cache before it"
        )


def _top_forward(self: torch.nn.Module, run: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for the forward of the model around the decoder."""
    if compat.takes(getattr(run, "__func__", run), compat.CACHE):  # not so remote code
        kwargs = compat.named(kwargs)
    wanted, ids = kwargs.get("logits_to_keep", 0), args[0] if args else kwargs.get("input_ids")
    wanted = wanted if isinstance(wanted, int) and kwargs.get("labels") is None else 0
    call = OuterCall(self, kwargs.get("attention_mask"), wanted)
    with within(outer=call, few_rows=few_rows.has_few(self, ids, kwargs.get("inputs_embeds"))):
        output = run(*args, **kwargs)
    spans, call.spans = call.spans, None  # no cycle keeps the cache's memory
    if spans is not None:
        spans.settle()
    return output


def forward(self: Any, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Stands in for `run`, the decoder's forward; same arguments, same result."""
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


def _forward(self: Any, run: Any, plan: Any, args: tuple, kwargs: dict) -> Any:
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
        _refuse_backward(self, kwargs.get("inputs_embeds"), output)
    return output if arguments.return_dict is not False else output.to_tuple()


def _read(decoder: torch.nn.Module, run: Any, plan: Any, kwargs: dict) -> tuple:
    arguments = Arguments(decoder, plan, kwargs)
    spans = Spans(arguments, run)
    for _ in spans.steps():
        pass
    arguments.packing.unpack(spans.output)
    if arguments.top is None:
        spans.settle()
    else:
        arguments.outer.spans = spans  # settled once the model's call has ended
    return arguments, spans.output


def reading(top: torch.nn.Module, ids: torch.Tensor, cache: Any) -> Generator[Step, None, Any]:
    """Read a prompt's ids [B, N] into a cache, as a call of the model does, but for a driver that decides between the
    chunks: yields each `Step` but the last once it is done. Returns the model's output, with logits of the last token.
    No gradients."""
    decoder, inside = find_decoder(top), contextvars.copy_context()
    given = {"input_ids": ids, compat.CACHE: cache, "use_cache": True, "return_dict": True}

    def begin() -> Any:
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
    self: Any, run: Any, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple:
    """Rotary frequencies of the full prompt for each chunk: the prompt's last position is appended, then dropped."""
    step = current()
    if step is None or step.final_position is None:
        return run(x, position_ids, *args, **kwargs)
    final = position_ids.new_full((*position_ids.shape[:-1], 1), step.final_position)
    cos, sin = run(x, torch.cat([position_ids, final], -1), *args, **kwargs)
    return cos[:, :-1], sin[:, :-1]


class _NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, anchor: torch.Tensor) -> Any:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> None:
        raise RuntimeError(
            "attention over an evicted cache has no gradient; call model.train(), pass use_cache=False, or "
            "kvevict.unpatch(model) before training"
        )


def _refuse_backward(decoder: torch.nn.Module, embeds: torch.Tensor | None, output: Any) -> None:
    """Make a result's backward pass an error; it would silently lack the decoder's gradients."""
    inputs = [] if embeds is None else [embeds]
    anchor = next((p for p in (*inputs, *decoder.parameters()) if p.requires_grad), None)
    if anchor is not None:
        output.last_hidden_state = _NoBackward.apply(output.last_hidden_state, anchor)


def _when_patched(function: Any, model: torch.nn.Module, run: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a stand-in for a method of the model if the caller has a policy."""
    installed = find_decoder(model).__dict__.get(STATE)
    patched = installed is not None and installed.chosen() is not None
    return function(model, run, *args, **kwargs) if patched else run(*args, **kwargs)


# Stand-ins for methods of the model around the decoder, by name.
STAND_INS: dict = {name: functools.partial(_when_patched, function) for name, function in compat.STAND_INS.items()}
STAND_INS["generate"] = _generate
