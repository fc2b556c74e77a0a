"""What scores are made of: one file per quantity of a layer's slots, with its cost beside it.

A quantity is a frozen dataclass whose fields are its options; the file registers it. A part of a policy names those it
needs, and only these are computed, each once per layer and cut. `kvevict plan` prices a policy by their `passes` and
`scans`.
"""

import functools
import sys
from dataclasses import dataclass
from typing import ClassVar

import torch

from .... import _ops
from ....policy.needs import as_needs
from ....policy.registry import Registry, load_folder
from .. import per_row

QUANTITIES = Registry("quantity")


@dataclass(frozen=True)
class Quantity:
    observes: ClassVar[bool] = True  # it is of the observing rows; False: of the slots alone
    outputs: ClassVar[bool] = False  # needs the observers' attention outputs
    hidden: ClassVar[bool] = False  # needs the input of the layer's attention block, `KV.hidden`
    rotates: ClassVar[bool] = False  # rotates queries or keys, so models are checked
    of_tokens: ClassVar[bool] = False  # of each token alone, by its hidden state: decoded ones have it, too (`tokens`)

    def ready(self, decoder, modules) -> None:
        """Raise ValueError for a decoder of which it cannot be measured; modules: the attention modules of the layers
        that evict. Called when a model is patched."""

    def accumulate(self, rows) -> None:
        """Take in the `LayerRows` of a chunk. Called for every chunk of a prompt and every layer that chooses, before
        anything of it is measured, also when nothing is evicted."""

    def measure(self, slots, observation):
        """The quantity of a layer's `Slots` and of the `Observation` of them: mostly fp32 [B, Hkv, C], column i being
        alive slot i."""
        raise NotImplementedError

    def tokens(self, step, module, x):
        """Of a quantity that is `of_tokens`: fp32 [B, Hkv, T] of the tokens with the inputs x [B, T, E] of a layer's
        attention block. A score with carry="keep" that needs it alone returns it as it is."""
        raise NotImplementedError

    def passes(self, known: bool = False) -> int:
        """How often the observers' logits are computed. known: of a single row, its attention is there already."""
        return 0

    def looks_at(self, alive: int, again: int) -> int:
        """How many of a head's alive slots a pass looks at; again: how many of them are a part that is repeated after
        its whole prompt, 0 where none is."""
        return alive

    def attended(self, tokens: int, stored: int, appended: int) -> int:
        """Pairs of a query and a slot over which attention is taken once more, after a chunk, or the part that is
        repeated, of so many tokens, to which `appended` ones are appended, over `stored` slots of each head."""
        return 0

    def scans(self) -> int:
        """How often every slot's key or value is read besides."""
        return 0

    def products(self, rows: int, slots: int) -> int:
        """Vectors that are multiplied with a [d, d] matrix of each query head, after a chunk of `rows` rows, over
        `slots` alive slots (0: it is not measured)."""
        return 0

    def flops(self, shape, rows: int, slots: int) -> int:
        """FLOPs of a layer's other matrix products, after a chunk of `rows` rows, over its `slots` alive slots per
        head; shape: a `kvevict.analysis.shape.Shape`."""
        return 0


@functools.cache
def quantity(need) -> Quantity:
    """The quantity that a `Need` names. Raises ValueError, with the nearest names, for one that does not exist."""
    kind, options = QUANTITIES.find(need.name), dict(need.options)
    try:
        return kind(**options)
    except TypeError:
        raise ValueError(f"quantity {need.name!r} does not have the options {options}") from None


def check_needs(score) -> None:
    """Raise ValueError, with the nearest names, if a score's class needs a quantity that does not exist. Needs that
    depend on its options are checked when a model is patched."""
    for needs in (score.needs, score.factors):
        for each in as_needs(needs if isinstance(needs, tuple) else ()):
            QUANTITIES.find(each.name)


def of_policy(policy) -> list:
    """The quantities that a policy's parts need, each once. Raises ValueError for one that does not exist."""
    parts = policy.score.needs, policy.score.factors, policy.refine.picks_by, policy.layers.needs
    return [quantity(each) for each in dict.fromkeys(each for needs in parts for each in as_needs(needs))]


def rotates(policy, rope_depends_on_length: bool) -> bool:
    """Whether what a policy measures rotates keys or queries. Raises ValueError where it does, for a model whose rotary
    frequencies change with the prompt's length."""
    found = any(each.rotates for each in of_policy(policy))
    if found and rope_depends_on_length:
        raise ValueError(
            f"score {type(policy.score).__name__} rotates keys back to what they were before positions, and this "
            "model's rotary frequencies change with the prompt's length (longrope, dynamic): take another score"
        )
    return found


def measured(needs, slots, observe, known: dict) -> list:
    """The quantities that are needed of a layer's slots.

    observe   () -> the layer's `Observation`, asked for once
    known     quantities that were measured before, to which these are added
    """
    named = as_needs(needs)
    for need in named:
        wanted = quantity(need)
        if need not in known:
            if wanted.observes and "observation" not in known:
                known["observation"] = observe()
            known[need] = wanted.measure(slots, known.get("observation"))
    return [known[need] for need in named]


def observed(op, slots, part, more=(), group=None, **options):
    """An op (`kvevict._ops`.score, peak or error) of observers over the alive slots."""
    kv, values = slots.kv, op is _ops.error
    stored = kv.stored
    held, new = ((stored.k, stored.v), (kv.k, kv.v)) if values else ((stored.k,), (kv.k,))
    if group is not None:
        latent = stored.len.shape[1] != slots.heads.count  # one group of all query heads, each with its own keys
        options["group"] = "none" if latent else group
    if part.until is not None:
        found = per_row.observed(op, slots, part, held, new, more, **options, **kv.options)
    else:
        found = op(
            part.q, part.skip.to(torch.int32), *held, stored.offset, stored.len, *new, kv.first,
            part.stop.to(torch.int32), *more, lse=part.lse, causal=part.causal, **options, **kv.options,
        )  # fmt: skip
    return slots.heads.reduce(found, group) if group is not None and latent else found


def each_head(slots, of: str):
    """Yields (b, h, x [n, D], ..) of every head's alive keys ("k"), values ("v"), or both ("kv")."""
    kv, stored = slots.kv, slots.kv.stored
    for b, h, rows in stored.segments():
        new = slice(int(kv.padding[b]), None)
        yield b, h, *(torch.cat([getattr(stored, x)[rows], getattr(kv, x)[b, h, new]]) for x in of)


def per_head(slots, of: str, function):
    """function(x [n, D]) -> [n] of every head's alive keys ("k") or values ("v"): [B, Hkv, C]."""
    out = torch.zeros(*slots.kv.stored.len.shape, slots.columns, device=slots.device)
    for b, h, x in each_head(slots, of):
        out[b, h, : len(x)] = function(x)
    return slots.heads.merge(out)


load_folder(sys.modules[__name__])
