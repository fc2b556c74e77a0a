"""Installation of the engine in a model, and the choice of each call's policy.

A model is installed once: its attention modules and forwards are diverted. A call has the policy of its thread and
context (`using`), or else the model's default (`kvevict.patch`); a call without either runs unpatched. The modules
are restored when the model has no default policy and no call or block needs them any more.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...context import context, within
from ...models import families
from ...models.compat import STATE
from ..methods import propagate, residual
from ..read.plan import Plan
from . import attention, forward, states

_installing = threading.RLock()  # guards the installation of models; each `Installed` has another lock for its users


class Installed:
    """The installation of one text decoder, an attribute of the decoder.

    It has no strong reference to the model, so that copies of the model stay independent.
    """

    def __init__(self, decoder: torch.nn.Module) -> None:
        config = decoder.config
        self.kinds, self.readers = families.layer_kinds(config), families.readers(config)
        self.order = families.evicting(config)
        self.own: Plan | None = None  # the kvevict.engine.read.plan.Plan of the model's default policy
        self.hooks: dict = {}  # purpose of the hooks -> their handles
        self._forget()

    def _forget(self) -> None:
        self.tops, self.users, self.lock = weakref.WeakSet(), 0, threading.RLock()

    def __getstate__(self) -> dict:
        return {name: value for name, value in self.__dict__.items() if name not in ("tops", "users", "lock")}

    def __setstate__(self, state: dict) -> None:
        """State of a copy, possibly in another process: it has no running call. Its outer model is registered again
        when it is patched or unpatched."""
        self.__dict__.update(state)
        self._forget()
        attention.register()

    def chosen(self) -> Plan | None:
        """The `Plan` of calls in this thread and context; None: they run unpatched."""
        return context().plans.get(self, self.own)

    def modules(self, decoder: torch.nn.Module) -> list[torch.nn.Module]:
        """The attention modules of the layers that evict, and of the layers that read their keys and values."""
        return families.attentions(decoder, (*self.order, *self.readers))

    # -- users -------------------------------------------------------------------------------------------------------

    def enter(self, decoder: torch.nn.Module) -> bool:
        """True if the model is still installed; it then stays installed until `leave`."""
        with self.lock:
            here = decoder.__dict__.get(STATE) is self
            self.users += here
            return here

    def leave(self, decoder: torch.nn.Module) -> None:
        with _installing, self.lock:
            self.users -= 1
            if self.users == 0 and self.own is None:
                self._remove(decoder)

    # -- the modules -------------------------------------------------------------------------------------------------

    def _hook(self, decoder: torch.nn.Module, plan: Plan) -> None:
        """Install the hooks that a policy needs; they do nothing for other policies' calls.

        If another thread adds or removes a hook during a forward, torch may call this one without kwargs.
        """
        if plan.tsp is not None and "tsp" not in self.hooks:
            self.hooks["tsp"] = propagate.install(decoder)
        if plan.wants_hidden and "hidden" not in self.hooks:
            self.hooks["hidden"] = attention.note_inputs(decoder, self.order)
        until = plan.policy.layers.residual
        if until != "off" and until not in self.hooks:
            self.hooks[until] = residual.install(decoder, until, self.order, plan.after_attention)

    def _around(self, top: torch.nn.Module, decoder: torch.nn.Module) -> None:
        """Install the stand-ins of a model around the decoder."""
        if top is not decoder:
            forward.install_around(top)
            self.tops.add(top)

    def _divert(self, decoder: torch.nn.Module) -> None:
        attention.register()
        for module in self.modules(decoder):
            attention.divert(module)
        object.__setattr__(decoder, STATE, self)
        forward.install(decoder)
        states.install(decoder, self.kinds)

    def _remove(self, decoder: torch.nn.Module) -> None:
        if decoder.__dict__.get(STATE) is not self:
            return
        for hook in (each for hooks in self.hooks.values() for each in hooks):
            hook.remove()
        self.hooks = {}
        states.remove(decoder, self.kinds)
        forward.remove(decoder, list(self.tops))
        self.tops.clear()
        for module in self.modules(decoder):
            attention.restore(module)
        object.__delattr__(decoder, STATE)


def of(decoder: torch.nn.Module) -> Installed | None:
    return decoder.__dict__.get(STATE)


def plan_of(decoder: torch.nn.Module) -> Plan | None:
    """The `Plan` of a decoder's calls in this thread and context; None: they run unpatched."""
    installed = of(decoder)
    return None if installed is None else installed.chosen()


@contextlib.contextmanager
def _held(top: torch.nn.Module, decoder: torch.nn.Module, plan: Plan | None) -> Iterator[Installed]:
    """Inside, the decoder's `Installed`, made now if needed, has one more user, and the hooks for a `Plan`."""
    with _installing:
        installed = of(decoder)
        if installed is None:
            installed = Installed(decoder)
            installed._divert(decoder)
        with installed.lock:
            installed._around(top, decoder)
            installed.users += 1
    try:
        if plan is not None:
            with installed.lock:
                installed._hook(decoder, plan)
        yield installed
    finally:
        installed.leave(decoder)


def set_own(top: torch.nn.Module, decoder: torch.nn.Module, plan: Plan | None) -> None:
    """Set or replace a model's default policy; None: remove it."""
    with _held(top, decoder, plan) as installed:
        installed.own = plan


@contextlib.contextmanager
def using(top: torch.nn.Module, decoder: torch.nn.Module, plan: Plan | None) -> Iterator[None]:
    """Inside, in this thread and context, the model's calls have the policy of a `Plan`; None: they run unpatched."""
    with _held(top, decoder, plan) as installed, within(plans={**context().plans, installed: plan}):
        yield


@contextlib.contextmanager
def overheard(
    top: torch.nn.Module, decoder: torch.nn.Module, note: Callable[[Any, torch.Tensor, torch.Tensor], None]
) -> Iterator[None]:
    """Inside, in this thread and context, the model runs unpatched. Layers that would evict call
    note(module, query, key) with their attention's inputs."""
    with using(top, decoder, None), within(note=note):
        yield
