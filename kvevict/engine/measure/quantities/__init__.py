"""Quantities of a layer's slots, the ingredients of scores, with their registry.

A quantity is a frozen dataclass whose fields are its options. A part of a policy names the quantities that it needs,
and only these are computed, each once per layer and cut.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ....ops import _ops
from ....policy.inputs import LayerRows, Need, Observation, Observers, Slots, as_needs
from ....policy.policy import Policy
from ....policy.registry import Registry, load_folder
from .. import per_row
from ..inputs import INPUTS

QUANTITIES: Registry = Registry("quantity")


@dataclass(frozen=True)
class Quantity:
    """A number, or several, of every slot of a layer. A subclass overrides `measure`."""

    observes: ClassVar[bool] = True  # depends on the observing rows; False: on the slots alone
    outputs: ClassVar[bool] = False  # needs the observers' attention outputs
    needs: ClassVar[tuple[str | Need, ...]] = ()  # further inputs of `measure`, by name (engine/measure/inputs.py)
    remembers: ClassVar[str] = ""  # name that a layer keeps the result of `accumulate` under; "": nothing is kept
    of_tokens: ClassVar[bool] = False  # depends on a token's hidden state alone, so that `tokens` computes it, too

    def __init_subclass__(cls) -> None:
        """Raise TypeError if the class has `accumulate`, and `remembers` is empty."""
        super().__init_subclass__()
        if "accumulate" in vars(cls) and not cls.remembers:
            raise TypeError(f"quantity {cls.__name__} accumulates, and `remembers` names nothing to keep: give a name")

    def ready(self, decoder: torch.nn.Module, modules: list[torch.nn.Module]) -> None:
        """Raise ValueError if the quantity cannot be measured in a decoder, when it is patched. modules: the attention
        modules of the layers that evict."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the inputs in `needs`."""
        return tuple(each.name for each in as_needs(self.needs))

    def accumulate(self, rows: LayerRows, past: torch.Tensor | None) -> torch.Tensor | None:
        """Return a tensor [B, ..] that sums up the layer's queries so far, from the `LayerRows` of a chunk and the
        result for the chunk before, at first None. Quantities with one name in `remembers` share it. Called for every
        chunk of a prompt and every layer that chooses, before any measurement, also when no slot is evicted."""
        return past

    def measure(self, slots: Slots, observation: Any, *inputs: Any) -> Any:
        """Measure a layer's `Slots` with their `Observation`: mostly fp32 [B, Hkv, C], column i being alive slot i.
        inputs: the values of `needs`."""
        raise NotImplementedError

    def tokens(self, *inputs: Any) -> torch.Tensor:
        """Compute an `of_tokens` quantity from the values of `needs`: fp32 [B, Hkv, T], a number per token and kv head.
        It is the score if a score needs only this quantity and carry="keep"."""
        raise NotImplementedError


@functools.cache
def quantity(need: Need) -> Quantity:
    """The quantity that a `Need` names. Raises ValueError, with the nearest names, for an unknown one."""
    kind, options = QUANTITIES.find(need.name), dict(need.options)
    try:
        return kind(**options)
    except TypeError:
        raise ValueError(f"quantity {need.name!r} does not have the options {options}") from None


def check_needs(score: Any) -> None:
    """Raise ValueError, with the nearest names, if a score's class needs an unknown quantity. Needs that depend on the
    score's options are checked when a model is patched."""
    for needs in (score.needs, score.factors):
        for each in as_needs(needs if isinstance(needs, tuple) else ()):
            QUANTITIES.find(each.name)


def of_policy(policy: Policy) -> list[Quantity]:
    """The quantities that a policy's parts need, each once. Raises ValueError for unknown quantities or inputs of
    them."""
    parts = policy.score.needs, policy.score.factors, policy.refine.picks_by, policy.layers.needs
    found = [quantity(each) for each in dict.fromkeys(each for needs in parts for each in as_needs(needs))]
    for name in (name for each in found for name in each.inputs):
        INPUTS.find(name)
    return found


def rotates(policy: Policy, rope_depends_on_length: bool) -> bool:
    """Whether a policy's quantities rotate keys or queries. If so, raises ValueError for a model whose rotary
    frequencies change with the prompt's length."""
    found = any("rope" in each.inputs for each in of_policy(policy))
    if found and rope_depends_on_length:
        raise ValueError(
            f"score {type(policy.score).__name__} rotates keys back to what they were before positions, and this "
            "model's rotary frequencies change with the prompt's length (longrope, dynamic): take another score"
        )
    return found


def measured(
    needs: Any, slots: Slots, observation: Observation | None, given: Mapping[Need, Any], known: dict[Need, Any]
) -> list[Any]:
    """The quantities that a part of a policy needs. Those that are not in `known` are measured and added to it. given:
    the inputs of quantities besides `Slots` and `Observation`, by `Need`. Raises ValueError for a missing input."""
    for need in as_needs(needs):
        if need not in known:
            wanted = quantity(need)
            if wanted.observes and observation is None:
                raise ValueError(f"quantity {need.name!r} is measured by rows that observe: give an Observation")
            for each in as_needs(wanted.needs):
                if each not in given:
                    raise ValueError(
                        f"quantity {need.name!r} needs the input {each.name!r}: pass it in `given`, by {each}"
                    )
            inputs = [given[each] for each in as_needs(wanted.needs)]
            known[need] = wanted.measure(slots, observation, *inputs)
    return [known[need] for need in as_needs(needs)]


def remembered(needed: list[Quantity], rows: LayerRows, memory: dict[str, torch.Tensor]) -> dict[str, Any]:
    """A layer's memory after a chunk, as a new dict, from the `memory` before. needed: the policy's quantities."""
    each = {quantity.remembers: quantity for quantity in needed if quantity.remembers}
    return memory | {name: quantity.accumulate(rows, memory.get(name)) for name, quantity in each.items()}


def observed(
    op: Callable[..., torch.Tensor], slots: Slots, part: Observers, more: Sequence[torch.Tensor] = (),
    group: str | None = None, **options: Any,
) -> torch.Tensor:  # fmt: skip
    """Call an op (`score`, `peak` or `error` of `kvevict.ops._ops`) for observers over the alive slots. group: the op's
    reduction over the query heads of a kv head; None: it has none."""
    kv = slots.kv
    stored, new = kv.stored, (kv.k, kv.v) if op is _ops.error else (kv.k,)
    if group is not None:
        latent = stored.len.shape[1] != slots.heads.count  # all query heads are one group, but each has other keys
        options["group"] = "none" if latent else group
    if part.until is not None:
        found = per_row.observed(op, slots, part, new, more, **options, **kv.options)
    else:
        found = op(
            part.q, part.skip.to(torch.int32), stored, *new, kv.first, part.stop.to(torch.int32), *more, lse=part.lse,
            causal=part.causal, **options, **kv.options,
        )  # fmt: skip
    if part.unseen is not None and op is not _ops.peak:  # `peak` gets ranges without these slots
        at = slots.at(part.unseen)
        found = found.masked_fill(at.repeat_interleave(found.shape[1] // at.shape[1], 1), 0)
    return slots.heads.reduce(found, group) if group is not None and latent else found


def each_head(slots: Slots, of: str) -> Iterator[Any]:
    """Yield (b, h, x [n, D], ..) of every head's alive keys ("k"), values ("v"), or both ("kv")."""
    kv, stored = slots.kv, slots.kv.stored
    for b, h, rows in stored.segments():
        new = slice(int(slots.padding[b]), None)
        yield b, h, *(torch.cat([stored.numbers(x, b, h, rows), getattr(kv, x)[b, h, new]]) for x in of)


def per_head(slots: Slots, of: str, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Apply function(x [n, D]) -> [n] to every head's alive keys ("k") or values ("v"): [B, Hkv, C]."""
    out = torch.zeros(*slots.kv.stored.len.shape, slots.columns, device=slots.device)
    for b, h, x in each_head(slots, of):
        out[b, h, : len(x)] = function(x)
    return slots.heads.merge(out)


load_folder(__name__)
