"""The ingredients of scores: one file per quantity of a layer's slots.

A quantity is a frozen dataclass; its fields are its options, and the file registers it. A part of a policy names the
quantities it needs. Only these are computed, each once per layer and cut.
"""

import functools
from collections.abc import Iterator, Mapping
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
    observes: ClassVar[bool] = True  # depends on the observing rows; False: on the slots alone
    outputs: ClassVar[bool] = False  # needs the observers' attention outputs
    needs: ClassVar[tuple[Any, ...]] = ()  # inputs of `measure` and `tokens` (engine/measure/inputs.py): names, `Need`s
    remembers: ClassVar[str] = ""  # name that a layer keeps the result of `accumulate` under; "": it is not called
    of_tokens: ClassVar[bool] = False  # depends on a token's hidden state alone; decoded tokens have it too (`tokens`)

    def __init_subclass__(cls) -> None:
        """Raise TypeError if the class accumulates and has no name to keep the result under."""
        super().__init_subclass__()
        if "accumulate" in vars(cls) and not cls.remembers:
            raise TypeError(f"quantity {cls.__name__} accumulates, and `remembers` names nothing to keep: give a name")

    def ready(self, decoder: Any, modules: Any) -> None:
        """Raise ValueError for a decoder that does not allow the measurement; modules: the attention modules of the
        evicting layers. Called when a model is patched."""

    @property
    def inputs(self) -> tuple[Any, ...]:
        """Names of the inputs that it needs."""
        return tuple(each.name for each in as_needs(self.needs))

    def accumulate(self, rows: LayerRows, past: Any) -> Any:
        """A tensor [B, ..] of the layer's queries so far, from the `LayerRows` of a chunk and the result for the chunk
        before (None at first). The layer keeps it; quantities that remember under one name share it. Called for every
        chunk of a prompt and every layer that chooses, before any measurement, also when no slot is evicted."""
        return past

    def measure(self, slots: Slots, observation: Any, *inputs: Any) -> Any:
        """The quantity of a layer's `Slots` and their `Observation`: mostly fp32 [B, Hkv, C], column i being alive
        slot i. inputs: the values that it `needs`."""
        raise NotImplementedError

    def tokens(self, *inputs: Any) -> torch.Tensor:
        """For an `of_tokens` quantity: one fp32 number per token and kv head, [B, Hkv, T], from the values that it
        `needs`. If a score needs only this quantity and carry="keep", the number is the score."""
        raise NotImplementedError


@functools.cache
def quantity(need: Any) -> Quantity:
    """The quantity named by a `Need`. Raises ValueError, with the nearest names, for an unknown one."""
    kind, options = QUANTITIES.find(need.name), dict(need.options)
    try:
        return kind(**options)
    except TypeError:
        raise ValueError(f"quantity {need.name!r} does not have the options {options}") from None


def check_needs(score: Any) -> None:
    """Raise ValueError, with the nearest names, if a score's class needs an unknown quantity. Needs that depend on its
    options are checked when a model is patched."""
    for needs in (score.needs, score.factors):
        for each in as_needs(needs if isinstance(needs, tuple) else ()):
            QUANTITIES.find(each.name)


def of_policy(policy: Policy) -> list[Any]:
    """The quantities needed by a policy's parts, each once. Raises ValueError for an unknown one, or an unknown input
    of one."""
    parts = policy.score.needs, policy.score.factors, policy.refine.picks_by, policy.layers.needs
    found = [quantity(each) for each in dict.fromkeys(each for needs in parts for each in as_needs(needs))]
    for name in (name for each in found for name in each.inputs):
        INPUTS.find(name)
    return found


def rotates(policy: Policy, rope_depends_on_length: bool) -> bool:
    """True if a policy's quantities rotate keys or queries. If so, raises ValueError for a model with rotary
    frequencies that change with the prompt's length."""
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
    """The quantities that a part of a policy needs. Those that are not `known` yet are measured and added to it.

    given: by `Need` the inputs that quantities need beside `Slots` and `Observation`. Raises ValueError without one.
    """
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


def remembered(needed: Any, rows: LayerRows, memory: dict[str, Any]) -> dict[str, Any]:
    """A layer's memory after a chunk. needed: the policy's quantities; memory: the one before, left as it is."""
    each = {quantity.remembers: quantity for quantity in needed if quantity.remembers}
    return memory | {name: quantity.accumulate(rows, memory.get(name)) for name, quantity in each.items()}


def observed(op: Any, slots: Slots, part: Observers, more: Any = (), group: str | None = None, **options: Any) -> Any:
    """An op (`kvevict.ops._ops`.score, peak or error) of observers over the alive slots."""
    kv = slots.kv
    stored, new = kv.stored, (kv.k, kv.v) if op is _ops.error else (kv.k,)
    if group is not None:
        latent = stored.len.shape[1] != slots.heads.count  # one group of all query heads; their keys differ
        options["group"] = "none" if latent else group
    if part.until is not None:
        found = per_row.observed(op, slots, part, new, more, **options, **kv.options)
    else:
        found = op(
            part.q, part.skip.to(torch.int32), stored, *new, kv.first, part.stop.to(torch.int32), *more, lse=part.lse,
            causal=part.causal, **options, **kv.options,
        )  # fmt: skip
    if part.unseen is not None and op is not _ops.peak:  # peak's numbers are of rows, and its ranges leave these out
        at = slots.at(part.unseen)
        found = found.masked_fill(at.repeat_interleave(found.shape[1] // at.shape[1], 1), 0)
    return slots.heads.reduce(found, group) if group is not None and latent else found


def each_head(slots: Slots, of: str) -> Iterator[Any]:
    """Yields (b, h, x [n, D], ..) of every head's alive keys ("k"), values ("v"), or both ("kv")."""
    kv, stored = slots.kv, slots.kv.stored
    for b, h, rows in stored.segments():
        new = slice(int(slots.padding[b]), None)
        yield b, h, *(torch.cat([stored.numbers(x, b, h, rows), getattr(kv, x)[b, h, new]]) for x in of)


def per_head(slots: Slots, of: str, function: Any) -> torch.Tensor:
    """Apply function(x [n, D]) -> [n] to every head's alive keys ("k") or values ("v"): [B, Hkv, C]."""
    out = torch.zeros(*slots.kv.stored.len.shape, slots.columns, device=slots.device)
    for b, h, x in each_head(slots, of):
        out[b, h, : len(x)] = function(x)
    return slots.heads.merge(out)


load_folder(__name__)
