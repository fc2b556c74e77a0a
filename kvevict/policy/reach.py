"""Decides whether an answer under recall attends to the slots of all tokens, or to chosen ones (METHODS section 13)."""

from typing import Any, NamedTuple

import torch
from torch import nn

from ..models import families
from . import kv
from .checks import keeps_all
from .policy import Policy


class Reach(NamedTuple):
    """How far an answer attends."""

    every: bool  # to the slots of all tokens, to its last token, by the rule of `recall_slots=None`
    why: str  # the reason, for `kvevict.report` and `kvevict plan`


class Sizes(NamedTuple):
    """What a decoded token reads of a model with an archive."""

    slot: int  # bytes of one token's keys and values in the archive, of all layers that evict
    weights: int  # bytes of the weights


def reach(policy: Policy, here: bool, tokens: int, sizes: Sizes) -> Reach:
    """Decide how far the answer to a prompt of `tokens` tokens attends, by shapes alone: to all slots, if nothing asks
    for fewer and if a token then reads no more bytes of the archive than of the weights. here: whether the archive is
    in the memory of the model's device."""
    if policy.recall_check is not None:
        return Reach(False, f"all slots, by checks of {policy.recall_check} tokens: recall_check was given")
    for name in ("recall_slots", "recall_after", "threshold"):
        if (given := getattr(policy, name)) is not None:
            all_slots = name == "recall_slots" and keeps_all(given)
            return Reach(False, f"{'all' if all_slots else 'chosen'} slots: {name}={given} was given")
    if policy.decode:
        return Reach(False, "chosen slots: decode=True evicts while an answer is written")
    if not here:
        return Reach(False, "chosen slots: the archive is not in the memory of the model's device")
    archive = tokens * sizes.slot
    read = f"a token would read {_mib(archive)} MiB of the archive beside {_mib(sizes.weights)} of weights"
    if archive > sizes.weights:
        return Reach(False, f"chosen slots: {read}")
    return Reach(True, f"all slots: {read.replace(' would read', ' reads')}")


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f}" if size >= 100 << 20 else f"{size / 2**20:.3g}"


def sizes_of(decoder: nn.Module, kind: str) -> Sizes:
    """Return what a token reads of a decoder's weights, and of an archive whose slots are of `kind`, a name in
    `kv.KINDS`. Of embeddings a token reads rows only, but the output matrix is as large as one, and of a mixture's
    weights those of the chosen experts."""
    config: Any = decoder.config
    dtype = next(w.dtype for w in decoder.parameters() if w.is_floating_point())
    embeddings = {id(w) for each in decoder.modules() if isinstance(each, nn.Embedding) for w in each.parameters()}
    chosen = getattr(config, "num_experts_per_tok", None) or 1
    read = config.vocab_size * config.hidden_size * dtype.itemsize
    for name, weight in decoder.named_parameters():
        of_expert = weight.ndim == 3 or ".experts." in name
        experts = len(weight) if weight.ndim == 3 else getattr(config, "num_experts", None) or chosen
        share = min(chosen / experts, 1.0) if of_expert else float(id(weight) not in embeddings)
        read += round(share * weight.numel() * weight.element_size())
    return Sizes(slot_bytes(decoder, dtype, kind), read)


def slot_bytes(decoder: nn.Module, dtype: torch.dtype, kind: str, beside: int = 0) -> int:
    """Return the bytes of one slot in each kv head, summed over the kv heads of all tensor-parallel ranks and over all
    layers that evict. `kind` is how slots are stored, one of `kv.KINDS`; `beside` is the number of bytes per slot in
    addition to key and value."""
    config: Any = decoder.config
    modules = families.attentions(decoder, families.evicting(config))
    widths = [families.widths(module, config)[0] for module in modules]
    return families.slot_heads(config) * sum(kv.slot_bytes(kind, width, dtype.itemsize) + beside for width in widths)
