"""One call of the decoder with a cache: its arguments, checked, and the part of each chunk."""

import torch
from transformers.cache_utils import DynamicCache

from ...compat import CACHE
from ...context import context
from ..read import propagate
from ..read.step import OuterCall
from ..slots.adopt import EvictionCache
from . import arguments
from .inputs import Inputs
from .packing import Packing, Positions, packed_mask

OF_EVERY_TOKEN = ("output_hidden_states", "output_router_logits")  # outputs of every token: a chunk has only a part


class Request:
    """The arguments of a call: ids or embeddings [B, N], mask, positions and the cache before them.

    Raises ValueError, before the cache changes, for arguments that eviction does not support.
    """

    def __init__(self, decoder, patch, kwargs):
        kwargs = dict(kwargs)
        self.decoder, self.patch, self.policy = decoder, patch, patch.policy
        ids, embeds = kwargs.pop("input_ids", None), kwargs.pop("inputs_embeds", None)
        mask, position_ids = kwargs.pop("attention_mask", None), kwargs.pop("position_ids", None)
        self.return_dict = kwargs.pop("return_dict", getattr(decoder.config, "return_dict", True))
        cache = kwargs.pop(CACHE, None)
        kwargs.pop("use_cache", None)
        self.outer = context().outer or OuterCall(None, None, 0)
        self.top = self.outer.model
        self.wanted = self.outer.wanted  # number of last hidden states that the caller will use; 0: all
        if (ids is None) == (embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        inputs = Inputs(decoder, ids, embeds, kwargs)
        self.batch, self.tokens = inputs.tokens.shape[0], inputs.tokens.shape[1]
        self.device = inputs.tokens.device
        arguments.check_tokens(self.tokens, cache)
        self.cache, self.own_cache = DynamicCache(config=decoder.config) if cache is None else cache, cache is None
        self.columns = arguments.columns_of(self.cache, self.batch)
        mask = arguments.plain_mask(mask, self.outer, self.tokens)
        arguments.check_mask(mask, self.batch, self.columns, self.tokens)
        new = None if mask is None else mask[:, self.columns :]
        self.packing = packing = Packing(new, self.batch, self.device)
        self.first, self.padding = packing.first, packing.padding
        self._positions = Positions(decoder, position_ids, packing, mask, self.columns, self.tokens)
        self._mask = None if mask is None else torch.cat([mask[:, : self.columns], packing.pack(new)], 1)
        self._inputs = inputs.packed(packing)
        self.ids, self.embeds = self._inputs.ids, self._inputs.embeds
        if self.asks("output_attentions"):
            raise ValueError(
                "output_attentions=True is not possible: kvevict never builds attention matrices; leave it out, or "
                "call kvevict.unpatch"
            )
        if isinstance(self.cache, EvictionCache):
            one_by_one = self.tokens == 1 or (self.cache.record_past and self.wanted == self.tokens)  # or candidates
            self.cache.check_owner(decoder, patch.kinds, thorough=not one_by_one)
        arguments.make_ours(self.cache, patch, decoder.config, mask, self.columns)
        self.layers = [self.cache.layers[index] for index in patch.order]  # the layers that evict
        self.heads = patch.kv_heads
        if self.cache.next_position is not None:
            self._positions.follow(self.cache.next_position)
        self.rolls_back = self.cache.record_past
        arguments.check_roll_back(self)

    # -- the call as a whole ----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """From here on the cache changes. A call that ends before `settle` leaves it marked as half read."""
        self.cache.half_read = True
        self.outer.request = self

    def settle(self) -> None:
        """The call is done."""
        cache, packed = self.cache, self.packing.place is not None
        if packed:
            for layer in self.layers:
                layer.removable = 0  # the last columns are not the last slots of every row
            cache.packed += ((self.columns, self.columns + self.tokens),)
        before = cache.next_position
        if packed or before is not None:
            after = (self.positions()[:, -1] + 1).masked_fill(self.first == self.tokens, 0)
            cache.next_position = after if before is None else torch.maximum(before, after)
        cache.half_read = False

    def check_read(self, prompt: int, wanted: int, calls: int) -> None:
        """Raise ValueError if `prompt` columns cannot be read in `calls` calls: an argument cannot be split, outputs of
        every token are asked for, or rows that layers after `tsp` do not read."""
        flags = [flag for flag in OF_EVERY_TOKEN if self.asks(flag)]
        if flags and self.packing.place is not None:
            raise ValueError(f"{flags[0]}=True needs a batch padded at the left: set tokenizer.padding_side='left'")
        longest = min(self.policy.chunk_size or prompt, prompt - int(self.padding.min()))
        propagate.check(self.patch, longest, wanted, flags)
        name = self._inputs.unsplittable() if calls > 1 else None
        if name is not None:
            raise ValueError(f"{name} cannot be split into chunks; read the prompt in one pass with chunk_size=None")
        if calls > 1 and flags:
            raise ValueError(f"{flags[0]}=True needs the prompt in one pass: schedule='prompt' and no chunk_size")

    def scores(self, evicts) -> bool:
        """True if the call scores a text without a cache of the caller's: it then evicts only at its end."""
        evicts = evicts and self.policy.schedule == "prompt"
        return evicts and self.own_cache and self.top is not None and self.wanted != 1 and self.tokens > 1

    def asks(self, flag) -> bool:
        return bool(self._inputs.more.get(flag, getattr(self.decoder.config, flag, False)))

    def unpack(self, output) -> None:
        """Put the rows of the decoder's output back in the caller's columns: `Packing.unpack`."""
        self.packing.unpack(output)

    @property
    def follows(self) -> bool:
        """True if the tokens follow a prompt: a decoded one, or candidates that crop() may take back."""
        candidates = self.rolls_back and self.wanted == self.tokens
        return self.columns > 0 and (self.tokens == 1 or candidates)

    # -- its parts --------------------------------------------------------------------------------------------------

    def positions(self):
        """[B, N] of the new tokens."""
        return self._positions.tokens()

    def position_ids_of(self, start, end, positions):
        """The decoder's position_ids for columns start..end-1 and the rows after them, at positions [B, S] in all."""
        return self._positions.chunk(start, end, positions)

    def tokens_at(self, columns):
        """Ids or embeddings at columns [B, p]."""
        return self._inputs.at(columns)

    def embedded(self, ids):
        """Ids [B, p] in the form of the call's tokens: ids or embeddings."""
        return self._inputs.embedded(ids)

    def inputs(self, start, end, appended=None) -> dict:
        """The decoder's arguments for columns start..end-1 and, after them, the appended rows."""
        mask = self.mask_for(end, 0 if appended is None else appended.tokens.shape[1])
        cached = dict(attention_mask=mask, use_cache=True, return_dict=True) | {CACHE: self.cache}
        return self._inputs.chunk(start, end, appended, self.wanted) | cached

    def mask_for(self, end, appended=0):
        """Transformers' source of its masks, for the columns up to `end` and `appended` rows. Our layers read no mask;
        if all layers are ours, a ready-made 4D mask keeps Transformers from building one."""
        if self.patch.all_full_attention:
            return torch.empty(1, 1, 1, 1, device=self.device)
        if self._mask is None:
            return None
        mask = packed_mask(self._mask[:, : self.columns + end], self.cache.packed)
        return torch.cat([mask, mask.new_ones(self.batch, appended)], 1) if appended else mask
