"""Quantities of a layer's slots, from which scores are computed, with their registry.

A quantity is a frozen dataclass whose fields are its options. A part of a policy names the quantities that it needs,
and only these are computed, each once per layer and cut.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ....ops import _ops
from ....policy.inputs import CallRows, LayerRows, Need, Observation, Observers, Slots, as_needs
from ....policy.policy import Policy
from ....policy.registry import Registry, load_folder
from ....policy.rows import Rows
from .. import per_row
from ..inputs import INPUTS

QUANTITIES: Registry = Registry("quantity")


@dataclass(frozen=True)
class Quantity:
    """One or several numbers for every slot of a layer. A subclass overrides `measure`."""

    observes: ClassVar[bool] = True  # whether it depends on the observing rows; False: on the slots alone
    outputs: ClassVar[bool] = False  # whether `measure` needs the observing rows' attention outputs
    needs: ClassVar[tuple[str | Need, ...]] = ()  # further inputs of `measure`, by name (engine/measure/inputs.py)
    remembers: ClassVar[str] = ""  # name under which a layer keeps the result of `accumulate`; "": nothing is kept
    of_tokens: ClassVar[bool] = False  # whether it depends on a token's hidden state alone: `tokens` computes it, too

    def __init_subclass__(cls) -> None:
        """Raise TypeError if the class defines `accumulate` but gives no name in `remembers`."""
        super().__init_subclass__()
        if "accumulate" in vars(cls) and not cls.remembers:
            raise TypeError(f"quantity {cls.__name__} accumulates, and `remembers` names nothing to keep: give a name")

    def ready(self, decoder: torch.nn.Module, modules: list[torch.nn.Module]) -> None:
        """Raise ValueError if the quantity cannot be measured in this decoder. Called when a model is patched. modules:
        the attention modules of the layers that evict."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the inputs in `needs`, without their options."""
        return tuple(each.name for each in as_needs(self.needs))

    def accumulate(self, rows: LayerRows, past: torch.Tensor | None) -> torch.Tensor | None:
        """Return a tensor [B, ..] that summarises the layer's queries so far, from a chunk's `LayerRows` and the result
        `past` of the chunk before (None for the first chunk). Quantities with the same name in `remembers` share the
        result. Called for every chunk of a prompt in every layer that chooses slots, before any measurement, also when
        no slot is evicted."""
        return past

    def attend(
        self, rows: Rows, step: CallRows, op: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Let a chunk's rows attend and measure the quantity by one op, if the observing rows are the last ones of the
        chunk: (attention's output, log-sum-exp, what `measure` would return). None: there is no such op, so `measure`
        is called after attention. Asked only in layers of a prompt's chunk whose quantities are measured in any case.

        rows   the `Rows` that observe
        step   the facts about the call
        op     `kvevict.ops._ops.attend_score` with the tensors of the layer; it takes the other options of the op
        """
        return None

    def measure(self, slots: Slots, observation: Any, *inputs: Any) -> Any:
        """Measure a layer's `Slots`, as the rows of the `Observation` see them. Most quantities return fp32
        [B, Hkv, C], in which column i is alive slot i. inputs: the values of the names in `needs`, in this order."""
        raise NotImplementedError

    def tokens(self, *inputs: Any) -> torch.Tensor:
        """Compute a quantity with `of_tokens` from the values of `needs`: fp32 [B, Hkv, T], a number per kv head and
        token. With carry="keep", a score that needs only this quantity is equal to the quantity."""
        raise NotImplementedError


@functools.cache
def quantity(need: Need) -> Quantity:
    """The quantity that a `Need` names. Raises ValueError for an unknown name, with the nearest known names, or for an
    unknown option."""
    kind, options = QUANTITIES.find(need.name), dict(need.options)
    try:
        return kind(**options)
    except TypeError:
        raise ValueError(f"quantity {need.name!r} does not have the options {options}") from None


def check_needs(score: Any) -> None:
    """Raise ValueError, with the nearest known names, if a score's class needs an unknown quantity. Needs that depend
    on the score's options (properties of the class) are checked later, when a model is patched."""
    for needs in (score.needs, score.factors):
        for each in as_needs(needs if isinstance(needs, tuple) else ()):
            QUANTITIES.find(each.name)


def of_policy(policy: Policy) -> list[Quantity]:
    """The quantities that the parts of a policy need, each once. Raises ValueError if a quantity, or an input that one
    needs, is unknown."""
    parts = policy.score.needs, policy.score.factors, policy.refine.picks_by, policy.layers.needs
    found = [quantity(each) for each in dict.fromkeys(each for needs in parts for each in as_needs(needs))]
    for name in (name for each in found for name in each.inputs):
        INPUTS.find(name)
    return found


def rotates(policy: Policy, rope_depends_on_length: bool) -> bool:
    """Whether a quantity of the policy rotates keys or queries. Raises ValueError if one does and the model's rotary
    frequencies depend on the prompt's length."""
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
    """The values of the quantities that a part of a policy names in `needs`. A quantity that is not in `known` is
    measured and added to `known`. given: the quantities' inputs besides `Slots` and `Observation`, by `Need`. Raises
    ValueError if an input is missing."""
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
    """A layer's memory after a chunk, as a new dict: `memory`, with the new results of `Quantity.accumulate`. needed:
    the policy's quantities."""
    each = {quantity.remembers: quantity for quantity in needed if quantity.remembers}
    return memory | {name: quantity.accumulate(rows, memory.get(name)) for name, quantity in each.items()}


def observed(
    op: Callable[..., torch.Tensor], slots: Slots, part: Observers, more: Sequence[torch.Tensor] = (),
    group: str | None = None, **options: Any,
) -> torch.Tensor:  # fmt: skip
    """Call an op (`score`, `peak` or `error` of `kvevict.ops._ops`) with the queries of `part` over the alive slots.

    more      the op's arguments after `stop`
    group     the op's reduction over the query heads of a kv head; None: the op has no such argument (`peak`)
    options   the op's keyword arguments
    """
    kv = slots.kv
    stored, new = kv.stored, (kv.k, kv.v) if op is _ops.error else (kv.k,)
    if group is not None:
        latent = stored.len.shape[1] != slots.heads.count  # MLA: one choice for all heads, but each head's own keys
        options["group"] = "none" if latent else group
    if part.until is not None:
        found = per_row.observed(op, slots, part, new, more, **options, **kv.options)
    else:
        found = op(
            part.q, part.skip.to(torch.int32), stored, *new, kv.first, part.stop.to(torch.int32), *more, lse=part.lse,
            causal=part.causal, **options, **kv.options,
        )  # fmt: skip
    if part.unseen is not None and op is not _ops.peak:  # `peak` is called with ranges that leave unseen slots out
        at = slots.at(part.unseen)
        found = found.masked_fill(at.repeat_interleave(found.shape[1] // at.shape[1], 1), 0)
    return slots.heads.reduce(found, group) if group is not None and latent else found


def each_head(slots: Slots, of: str) -> Iterator[Any]:
    """Yield (b, h, x [n, D], ..) for every kv head h of batch row b: its n alive slots' keys (of="k"), values ("v"), or
    keys and values ("kv")."""
    kv, stored = slots.kv, slots.kv.stored
    for b, h, rows in stored.segments():
        new = slice(int(slots.padding[b]), None)
        yield b, h, *(torch.cat([stored.numbers(x, b, h, rows), getattr(kv, x)[b, h, new]]) for x in of)


def per_head(slots: Slots, of: str, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Apply function(x [n, D]) -> [n] to every kv head's n alive keys (of="k") or values ("v"). Returns [B, Hkv, C]."""
    out = torch.zeros(*slots.kv.stored.len.shape, slots.columns, device=slots.device)
    for b, h, x in each_head(slots, of):
        out[b, h, : len(x)] = function(x)
    return slots.heads.merge(out)


load_folder(__name__)
