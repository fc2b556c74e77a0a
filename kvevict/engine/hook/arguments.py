"""The arguments of one call of the decoder, which are checked before the cache changes and cut to chunks."""

import threading
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache

from ...context import context
from ...models.compat import CACHE
from ...models.owner import Owner
from ...policy.rows import AppendedRows
from ..memory.cache import EvictionCache, adopt
from ..memory.layer import HALF_READ, EvictionLayer
from ..read.plan import Plan
from ..read.step import OuterCall
from ..watch.diagnostics import Diagnostics
from .inputs import Inputs
from .packing import Packing, Positions, packed_mask, padding_of

# A 2D mask marks padding. An expanded mask is 4D (which row sees which column), or a dict: kind of layer -> 4D mask
Mask = torch.Tensor | dict[str, torch.Tensor] | None
OF_ANOTHER_THREAD = (
    "another thread is reading into past_key_values, or an error left it half read there: give each thread a fork "
    "(cache.fork()), or read the prompt into a new one"
)


class Arguments:
    """The arguments of one call of the decoder: token ids [B, N] or embeddings [B, N, E], mask, positions, and the
    cache, which holds earlier tokens.

    Raises ValueError, before the cache changes, for arguments that eviction does not support.
    """

    def __init__(self, decoder: Any, plan: Plan, kwargs: dict[str, Any]) -> None:
        self.decoder, self.plan, self.policy = decoder, plan, plan.policy
        self.watchers = context().watchers + ((Diagnostics(),) if plan.run.diagnose else ())
        self.outer = context().outer or OuterCall(None, None, 0)
        self.top, self.wanted = self.outer.model, self.outer.wanted
        kwargs = dict(kwargs)
        self.return_dict = kwargs.pop("return_dict", getattr(decoder.config, "return_dict", True))
        kwargs.pop("use_cache", None)
        ids, embeds, mask, position_ids, cache = (
            kwargs.pop(name, None) for name in ("input_ids", "inputs_embeds", "attention_mask", "position_ids", CACHE)
        )
        if (ids is None) == (embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        inputs = Inputs(decoder, ids, embeds, kwargs)
        (self.batch, self.tokens), self.device = inputs.tokens.shape[:2], inputs.tokens.device
        check_tokens(self.tokens, cache)
        self.cache, self.own_cache = DynamicCache(config=decoder.config) if cache is None else cache, cache is None
        self.columns = columns_of(self.cache, self.batch)
        mask = checked_mask(plain_mask(mask, self.outer, self.tokens), self.batch, self.columns, self.tokens)
        new = None if mask is None else mask[:, self.columns :]
        self.packing = packing = Packing(new, self.batch, self.device)
        self.first, self.padding = packing.first, packing.padding
        self.places = Positions(decoder, position_ids, packing, mask, self.columns, self.tokens)
        self._mask = None if mask is None else torch.cat([mask[:, : self.columns], packing.pack(new)], 1)
        self.given = inputs.packed(packing)
        self.ids: Any = self.given.ids
        self.tokens_at, self.embedded = self.given.at, self.given.embedded
        self.positions = self.places.tokens  # a function that returns the new tokens' positions [B, N]
        if self.asks("output_attentions"):
            raise ValueError(
                "output_attentions=True is not possible: kvevict never builds attention matrices; leave it out, or "
                "call kvevict.unpatch"
            )
        self.rolls_back = getattr(self.cache, "record_past", False)
        check_roll_back(self)
        if isinstance(self.cache, EvictionCache):
            # A decoded token, or the candidates of assisted decoding
            one_by_one = self.tokens == 1 or (self.rolls_back and self.wanted == self.tokens)
            self.cache.check_owner(decoder, plan.kinds, thorough=not one_by_one)
        make_ours(self.cache, plan, decoder.config, mask, self.columns)
        if not self.columns or self.cache.owner.model() is not decoder:
            self.cache.owner = Owner(decoder)
        self.layers = [self.cache.layers[index] for index in plan.order]  # the layers that evict
        if self.cache.sequence.next_position is not None:
            self.places.follow(self.cache.sequence.next_position)

    @property
    def seen(self) -> list[int]:
        """The number of tokens, without padding, that each batch row has read before this call."""
        seen = self.cache.sequence.seen
        return [0] * self.batch if seen is None else seen.tolist()

    def asks(self, flag: str) -> bool:
        """Whether the call sets a flag such as "output_attentions", or else the model's config does."""
        return bool(self.given.more.get(flag, getattr(self.decoder.config, flag, False)))

    def inputs(self, start: int, end: int, appended: AppendedRows | None = None) -> dict[str, Any]:
        """The decoder's arguments for the call's columns start .. end - 1, followed by the appended rows."""
        mask = self.mask_for(end, 0 if appended is None else appended.tokens.shape[1])
        cached = dict(attention_mask=mask, use_cache=True, return_dict=True) | {CACHE: self.cache}
        return self.given.chunk(start, end, appended, self.wanted) | cached

    def mask_for(self, end: int, appended: int = 0) -> torch.Tensor | None:
        """The 2D mask for the columns before `end` and `appended` rows. From it Transformers makes the masks of sliding
        layers. Evicting layers read no mask: if all layers evict, an empty 4D mask is returned, which keeps
        Transformers from making masks."""
        if self.plan.all_full_attention:
            return torch.empty(1, 1, 1, 1, device=self.device)
        if self._mask is None:
            return None
        mask = packed_mask(self._mask[:, : self.columns + end], self.cache.sequence.packed)
        return torch.cat([mask, mask.new_ones(self.batch, appended)], 1) if appended else mask


def check_tokens(tokens: int, cache: Cache | None) -> None:
    """Raise ValueError if a call has no new tokens."""
    if tokens == 0:
        held = cache.get_seq_length() if cache is not None else 0
        raise ValueError(
            f"the input has no tokens after the {held} that the cache holds: give `generate` the whole chat, which "
            "begins with these, or the model new tokens and an attention_mask that covers both"
            if held
            else "the input is empty: give at least one token"
        )


def columns_of(cache: Cache, batch: int) -> int:
    """The number of columns, padding included, that a cache has seen. Raises ValueError if a call with `batch` rows
    cannot continue this cache."""
    if not isinstance(cache, DynamicCache) or getattr(cache, "offloading", False):
        advice = "drop cache_implementation and offloading" if isinstance(cache, Cache) else "give one, or none"
        raise ValueError(
            f"past_key_values is {'an offloaded' if getattr(cache, 'offloading', False) else 'a'} "
            f"{type(cache).__name__} that kvevict cannot evict from; it works with a plain DynamicCache: {advice}"
        )
    columns = cache.get_seq_length()
    if not isinstance(cache, EvictionCache):
        return columns
    sequence = cache.sequence
    if sequence.half_read not in (0, threading.get_ident()):
        raise ValueError(OF_ANOTHER_THREAD)
    if sequence.half_read or sequence.columns != columns:
        raise ValueError(HALF_READ)
    if sequence.seen is not None and len(sequence.seen) != batch:
        rows, copies = len(sequence.seen), batch // len(sequence.seen)
        advice = f": for {copies} beams or answers of a row call batch_repeat_interleave({copies}) on the cache first"
        raise ValueError(
            f"past_key_values holds a batch of {rows} rows, the input has {batch}{'' if batch % rows else advice}"
        )
    return columns


def plain_mask(mask: Mask, outer: OuterCall, tokens: int) -> Mask:
    """Return the mask that the decoder got, or, if the outer model expanded the user's 2D mask to 4D masks, the user's
    2D mask. Raises ValueError if an expanded mask lets a token see a later one (Gemma 3's pictures)."""
    given = outer.mask
    is_expanded = isinstance(mask, dict) or (isinstance(mask, torch.Tensor) and mask.ndim == 4)
    is_plain = given is None or (isinstance(given, torch.Tensor) and given.ndim == 2)
    if not (is_expanded and is_plain and outer.model is not None):
        return mask
    for kind, each in (mask if isinstance(mask, dict) else {"full_attention": mask}).items():
        if not (isinstance(each, torch.Tensor) and each.ndim == 4 and each.shape[2] == tokens):
            continue
        sees = each if each.dtype == torch.bool else each >= 0
        if bool(sees[..., -tokens:].triu(1).any()):
            raise ValueError(
                "attention_mask lets tokens see later ones, as in pictures whose tokens see each other; read in "
                "chunks they would not: leave pictures away, or call kvevict.unpatch(model)"
            )
        if given is None and kind == "full_attention" and not bool(sees[..., -1, :].all()):
            raise ValueError("a padded batch needs attention_mask= by name, as a 2D tensor")
    return given


def checked_mask(mask: Mask, batch: int, columns: int, tokens: int) -> torch.Tensor | None:
    """Return the mask unchanged. Raises ValueError unless the mask is None, or 2D with a column for each of the
    `columns` that the cache has seen and for each of the `tokens` new tokens."""
    if mask is None:
        return None
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
        raise ValueError(
            "attention_mask must be a 2D tensor [batch, tokens] of zeros and ones; prepared 4D masks and mask "
            "dictionaries cannot be combined with eviction"
        )
    wanted = (batch, columns + tokens)
    if tuple(mask.shape) != wanted:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}, expected {wanted}: it must cover the {columns} "
            f"tokens seen and the {tokens} new ones"
        )
    return mask


def make_ours(cache: DynamicCache, plan: Plan, config: Any, mask: torch.Tensor | None, columns: int) -> None:
    """Turn a `DynamicCache` into an `EvictionCache`, unless it is one already. Raises ValueError if slots cannot be
    evicted from the cache."""
    layers, first = cache.layers, None
    ours = len(layers) == len(plan.kinds) and all(isinstance(layers[index], EvictionLayer) for index in plan.order)
    if ours and isinstance(cache, EvictionCache):
        return
    if mask is not None and not ours:
        first, _, holes = padding_of(mask[:, :columns])
        if holes:
            raise ValueError(
                "attention_mask must be left-padded (zeros first) for tokens that were read before patching: set "
                "tokenizer.padding_side='left', or read them with the patched model"
            )
    adopt(cache, plan.kinds, config, plan.ranks, first)


def check_roll_back(arguments: Arguments) -> None:
    """Raise ValueError if `generate` may take tokens back (assisted decoding), but the model or the policy forbids
    it."""
    policy = arguments.policy
    if arguments.rolls_back and arguments.plan.keeps_state:
        raise ValueError(
            "assisted and prompt-lookup decoding roll tokens back, which this model's layers with a state cannot: "
            "generate without an assistant"
        )
    if arguments.rolls_back and arguments.wanted > 1 and (policy.decode or policy.carry == "sum"):
        raise ValueError(
            "assisted and prompt-lookup decoding roll tokens back, which eviction while decoding and h2o's sums "
            "cannot: pass decode=False and another policy than h2o or vatp, or generate without an assistant"
        )
