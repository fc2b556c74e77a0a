"""Installation of the engine in a model, and the choice of each call's policy.

The engine is installed in a model once: it replaces forwards and diverts attention modules. A call uses the policy of
its thread and context (`using`), or else the model's default policy (`kvevict.patch`); without either it runs
unpatched. The model is restored once it has no default policy and no call or `using` block needs the engine any more.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator

import torch
from torch.utils.hooks import RemovableHandle

from ...context import context, within
from ...models import families
from ...models.compat import STATE
from ..methods import propagate, residual
from ..read.plan import Plan
from . import attention, forward, states

# Held while the engine is installed in a model or removed from it; the fields of an `Installed` have their own lock
_installing = threading.RLock()


class Installed:
    """The engine's installation in one text decoder. It holds no reference to the model, so a copy of the model stays
    independent."""

    def __init__(self, decoder: torch.nn.Module) -> None:
        config = decoder.config
        self.kinds, self.readers = families.layer_kinds(config), families.readers(config)
        self.order = families.evicting(config)
        self.own: Plan | None = None  # the `Plan` of the model's default policy
        self.hooks: dict[str, list[RemovableHandle]] = {}  # purpose of some hooks -> their handles
        self._forget()

    def _forget(self) -> None:
        """Reset the fields that a copy of the model does not share: the outer models, the number of users (running
        calls and `using` blocks), the lock."""
        self.tops, self.users, self.lock = weakref.WeakSet(), 0, threading.RLock()

    def __getstate__(self) -> dict:
        return {name: value for name, value in self.__dict__.items() if name not in ("tops", "users", "lock")}

    def __setstate__(self, state: dict) -> None:
        """Restore a copy, maybe in another process. A copy has no running call, and `_held` adds its outer model when
        a policy is set or used."""
        self.__dict__.update(state)
        self._forget()
        attention.register()

    def chosen(self) -> Plan | None:
        """The `Plan` that a call of the model has in this thread and context; None: the call runs unpatched."""
        return context().plans.get(self, self.own)

    def modules(self, decoder: torch.nn.Module) -> list[torch.nn.Module]:
        """The attention modules of the layers that evict, and of the layers that read an evicting layer's keys and
        values."""
        return families.attentions(decoder, (*self.order, *self.readers))

    def enter(self, decoder: torch.nn.Module) -> bool:
        """Count one more user (a call or a block), for whom the engine stays installed until `leave`. Returns False if
        the engine was removed before."""
        with self.lock:
            here = of(decoder) is self
            self.users += here
            return here

    def leave(self, decoder: torch.nn.Module) -> None:
        """Count one user less. Remove the engine if no user is left and the model has no default policy."""
        with _installing, self.lock:
            self.users -= 1
            if self.users == 0 and self.own is None:
                self._remove(decoder)

    def _hook(self, decoder: torch.nn.Module, plan: Plan) -> None:
        """Add the hooks that the policy of `plan` needs; in calls with other policies the hooks do nothing. If another
        thread adds or removes a hook during a forward, torch may call these hooks without kwargs."""
        if plan.tsp is not None and "tsp" not in self.hooks:
            self.hooks["tsp"] = propagate.install(decoder)
        if plan.wants_hidden and "hidden" not in self.hooks:
            self.hooks["hidden"] = attention.note_inputs(decoder, self.order)
        until = plan.policy.layers.residual
        if until != "off" and until not in self.hooks:
            self.hooks[until] = residual.install(decoder, until, self.order, plan.after_attention)

    def _install(self, decoder: torch.nn.Module) -> None:
        attention.register()
        for module in self.modules(decoder):
            attention.divert(module)
        object.__setattr__(decoder, STATE, self)
        forward.install(decoder)
        states.install(decoder, self.kinds)

    def _remove(self, decoder: torch.nn.Module) -> None:
        if of(decoder) is not self:
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
    """The `Installed` of a decoder; None: the engine is not installed in it."""
    return decoder.__dict__.get(STATE)


def plan_of(decoder: torch.nn.Module) -> Plan | None:
    """The `Plan` that a call of the decoder has in this thread and context; None: the call runs unpatched."""
    installed = of(decoder)
    return None if installed is None else installed.chosen()


@contextlib.contextmanager
def _held(top: torch.nn.Module, decoder: torch.nn.Module, plan: Plan | None) -> Iterator[Installed]:
    """Keep the engine installed in a model during this block, with the hooks that `plan` needs."""
    with _installing:
        installed = of(decoder)
        if installed is None:
            installed = Installed(decoder)
            installed._install(decoder)
        with installed.lock:
            if top is not decoder:
                forward.install_around(top)
                installed.tops.add(top)
            installed.users += 1
    try:
        if plan is not None:
            with installed.lock:
                installed._hook(decoder, plan)
        yield installed
    finally:
        installed.leave(decoder)


def set_own(top: torch.nn.Module, decoder: torch.nn.Module, plan: Plan | None) -> None:
    """Set the `Plan` of a model's default policy, in place of an earlier one; None: leave the model without a default
    policy."""
    with _held(top, decoder, plan) as installed:
        installed.own = plan


@contextlib.contextmanager
def using(top: torch.nn.Module, decoder: torch.nn.Module, plan: Plan | None) -> Iterator[None]:
    """Give the model's calls in this block, thread and context the policy of `plan`; None: these calls run
    unpatched."""
    with _held(top, decoder, plan) as installed, within(plans={**context().plans, installed: plan}):
        yield


@contextlib.contextmanager
def overheard(
    top: torch.nn.Module, decoder: torch.nn.Module, note: Callable[[torch.nn.Module, torch.Tensor, torch.Tensor], None]
) -> Iterator[None]:
    """Run the model's calls in this block, thread and context unpatched, and call note(module, query, key) in every
    layer that would evict, with the inputs of its attention function."""
    with using(top, decoder, None), within(note=note):
        yield
