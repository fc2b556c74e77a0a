"""One call of the decoder with a cache: its arguments, checked, and the parts of them that a chunk needs."""

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from .. import compat, families
from . import propagate
from .adopt import adopt
from .cache import HALF_READ, EvictionLayer
from .context import context
from .step import OuterCall

PER_LAYER = "per_layer_inputs"
OF_EVERY_TOKEN = ("output_hidden_states", "output_router_logits")  # outputs that a chunk has only its part of


class Request:
    """The arguments of a call: ids or embeddings [B, N], mask, positions and the cache they come behind."""

    def __init__(self, decoder, patch, kwargs):
        self.decoder, self.patch, self.policy, self.kwargs = decoder, patch, patch.policy, dict(kwargs)
        self.ids = self.kwargs.pop("input_ids", None)
        self.embeds = self.kwargs.pop("inputs_embeds", None)
        self.mask = self.kwargs.pop("attention_mask", None)
        self.position_ids = self.kwargs.pop("position_ids", None)
        self.return_dict = self.kwargs.pop("return_dict", getattr(decoder.config, "return_dict", True))
        self.cache = self.kwargs.pop("past_key_values", None)
        self.own_cache = self.cache is None
        self.kwargs.pop("use_cache", None)
        self.called = context().outer or OuterCall(None, None, 0)
        if (self.ids is None) == (self.embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        tokens = self.ids if self.ids is not None else self.embeds
        self.batch, self.tokens, self.device = tokens.shape[0], tokens.shape[1], tokens.device
        if self.tokens == 0:
            held = self.cache.get_seq_length() if self.cache is not None else 0
            raise ValueError(
                "the input is empty: give at least one token"
                + (f" after the {held} that the cache holds, and an attention_mask that covers both" if held else "")
            )
        self._check_cache()
        self.packed = None  # where padding is not all at the left: of every column [B, N] its place once it is
        self._check_mask()
        self.top = self.called.model
        self.wanted = self.called.wanted  # rows of the last hidden state that the caller will use; 0: all
        if self.asks("output_attentions"):
            raise ValueError(
                "output_attentions=True is not possible: kvevict never builds attention matrices; leave it out, or "
                "call kvevict.unpatch"
            )
        self._adopt_cache()
        if self.layers[0].upcoming is not None:
            self._go_on(self.layers[0].upcoming)
        self.rolls_back = self.layers[0].record_past or compat.may_roll_back(self.cache)
        if self.rolls_back and self.patch.keeps_state:
            raise ValueError(
                "assisted and prompt-lookup decoding roll tokens back, which this model's layers with a state cannot: "
                "generate without an assistant"
            )
        if self.rolls_back and self.wanted > 1 and (self.policy.decode or self.policy.carry == "sum"):
            raise ValueError(
                "assisted and prompt-lookup decoding roll tokens back, which eviction while decoding and h2o's sums "
                "cannot: pass decode=False and another policy than h2o or vatp, or generate without an assistant"
            )

    def _check_cache(self):
        if self.cache is None:
            self.cache = DynamicCache(config=self.decoder.config)
        if not isinstance(self.cache, DynamicCache) or getattr(self.cache, "offloading", False):
            raise ValueError(
                f"past_key_values is {'an offloaded' if getattr(self.cache, 'offloading', False) else 'a'} "
                f"{type(self.cache).__name__} that kvevict cannot evict from; it works with a "
                "plain DynamicCache: drop cache_implementation and offloading"
            )
        self.columns = self.cache.get_seq_length()
        for layer in self.cache.layers:
            if isinstance(layer, EvictionLayer):
                if layer.half_read or (layer.is_initialized and layer.columns != self.columns):
                    raise ValueError(HALF_READ)
                if layer.is_initialized and layer.len.shape[0] != self.batch:
                    raise ValueError(
                        f"past_key_values holds a batch of {layer.len.shape[0]} rows, the input has {self.batch}"
                    )

    def _adopt_cache(self):
        kinds, layers = self.patch.kinds, self.cache.layers
        if len(layers) == len(kinds) and all(isinstance(layers[index], EvictionLayer) for index in self.patch.order):
            return
        first = None
        if self.mask is not None:
            first, _, holes = _padding(self.mask[:, : self.columns])
            if holes:
                raise ValueError(
                    "attention_mask must be left-padded (zeros first) for tokens that were read before patching: set "
                    "tokenizer.padding_side='left', or read them with the patched model"
                )
        adopt(self.cache, kinds, self.decoder.config, first)
        self.cache.ranks = self.patch.ranks  # which save_cache asks for their parts

    def _check_mask(self):
        mask = self.mask = self._plain_mask()
        if mask is None:
            self.first = torch.zeros(self.batch, dtype=torch.int32, device=self.device)
            self.padding = np.zeros(self.batch, np.int64)
            return
        if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
            raise ValueError(
                "attention_mask must be a 2D tensor [batch, tokens] of zeros and ones; prepared 4D masks and mask "
                "dictionaries cannot be combined with eviction"
            )
        wanted = (self.batch, self.columns + self.tokens)
        if tuple(mask.shape) != wanted:
            raise ValueError(
                f"attention_mask has shape {tuple(mask.shape)}, expected {wanted}: it must cover the {self.columns} "
                f"tokens seen and the {self.tokens} new ones"
            )
        self.first, self.padding, holes = _padding(mask[:, self.columns :])
        if holes:
            self._pack()

    def _pack(self):
        """Move every row's tokens to the right, in their order, with their positions; padding comes first."""
        mask = self.mask[:, self.columns :].bool()
        order = mask.int().argsort(dim=1, stable=True)
        self.packed = (self.first[:, None] + mask.cumsum(1) - 1).clamp_min(0)
        position_ids = self._given_positions()
        self.position_ids = _take(position_ids.expand(*position_ids.shape[:-2], self.batch, -1), order, -1)
        self.ids, self.embeds = (None if t is None else _take(t, order, 1) for t in (self.ids, self.embeds))
        for name, value in self.kwargs.items():
            if isinstance(value, torch.Tensor) and value.shape[:2] == order.shape:
                self.kwargs[name] = _take(value, order, 1)
        self.mask = torch.cat([self.mask[:, : self.columns], _take(self.mask[:, self.columns :], order, 1)], 1)

    def _go_on(self, upcoming):
        """Rows go on where their tokens ended: generate counts on from the last column, which may have been padding."""
        first = self.first.long().clamp_max(self.tokens - 1)[:, None]
        late = (upcoming[:, None] - self.positions().gather(1, first)).clamp_min(0)
        self.position_ids = self.position_ids.expand(*self.position_ids.shape[:-2], self.batch, -1) + late

    def unpack(self, output) -> None:
        """Give every column its own row of the decoder's output again, or that of the last token before it."""
        if self.packed is None:
            return
        for name in ("last_hidden_state", "logits"):
            rows = getattr(output, name, None)
            if rows is not None:
                place = self.packed[:, -rows.shape[1] :] - (self.tokens - rows.shape[1])
                output[name] = _take(rows, place.clamp_min(0), 1)

    def _plain_mask(self):
        """The 2D mask; where a model around the decoder makes masks of it for every kind of layer, what it was made of.
        Raises ValueError where those let a token see a later one (Gemma 3's pictures)."""
        mask, given = self.mask, self.called.mask
        made = isinstance(mask, dict) or (isinstance(mask, torch.Tensor) and mask.ndim == 4)
        plain = given is None or (isinstance(given, torch.Tensor) and given.ndim == 2)
        if not (made and plain and self.called.model is not None):
            return mask
        for kind, each in (mask if isinstance(mask, dict) else {"full_attention": mask}).items():
            if not (isinstance(each, torch.Tensor) and each.ndim == 4 and each.shape[2] == self.tokens):
                continue
            sees = each if each.dtype == torch.bool else each >= 0
            if bool(sees[..., -self.tokens :].triu(1).any()):
                raise ValueError(
                    "attention_mask lets tokens see later ones, as in pictures whose tokens see each other; read in "
                    "chunks they would not: leave pictures away, or call kvevict.unpatch(model)"
                )
            if given is None and kind == "full_attention" and not bool(sees[..., -1, :].all()):
                raise ValueError("a padded batch needs attention_mask= by name, as a 2D tensor")
        return given

    def begin(self) -> None:
        """From here on the cache changes. Whatever ends the call before `settle` leaves it marked as half read."""
        self.layers[0].half_read = True
        self.called.request = self

    def settle(self) -> None:
        """The call is done."""
        if self.packed is not None:
            for layer in self.layers:
                layer.tail = 0  # the last columns are not the last slots of every row
            self.layers[0].packed += ((self.columns, self.columns + self.tokens),)
        before = self.layers[0].upcoming
        if self.packed is not None or before is not None:
            none = self.first == self.tokens
            after = (self.positions()[:, -1] + 1).masked_fill(none, 0)
            self.layers[0].upcoming = after if before is None else torch.maximum(before, after)
        self.layers[0].half_read = False

    def check_read(self, prompt: int, wanted: int, calls: int) -> None:
        """Raise ValueError for what reading `prompt` columns in `calls` calls cannot give: arguments that cannot be
        split, outputs of every token, rows that upper layers do not read."""
        flags = [flag for flag in OF_EVERY_TOKEN if self.asks(flag)]
        if flags and self.packed is not None:
            raise ValueError(f"{flags[0]}=True needs a batch padded at the left: set tokenizer.padding_side='left'")
        longest = min(self.policy.chunk_size or prompt, prompt - int(self.padding.min()))
        propagate.check(self.patch, longest, wanted, flags)
        for name, value in self.kwargs.items():
            split = name in ("visual_pos_masks", PER_LAYER) or not isinstance(value, torch.Tensor)
            if calls > 1 and not split and value.ndim > 1 and self.tokens in value.shape:
                raise ValueError(f"{name} cannot be split into chunks; read the prompt whole with chunk_size=None")
        if calls > 1 and flags:
            raise ValueError(f"{flags[0]}=True needs the prompt read whole: schedule='prompt' and no chunk_size")

    def scores(self, evicts) -> bool:
        """Whether a text is scored in one call whose cache nobody has asked for, and evicted from only behind it."""
        evicts = evicts and self.policy.schedule == "prompt"
        return evicts and self.own_cache and self.top is not None and self.wanted != 1 and self.tokens > 1

    def asks(self, flag) -> bool:
        return bool(self.kwargs.get(flag, getattr(self.decoder.config, flag, False)))

    @property
    def layers(self) -> list:
        """The cache layers that are evicted from."""
        return [self.cache.layers[index] for index in self.patch.order]

    @property
    def heads(self) -> int:
        return self.patch.kv_heads

    def _given_positions(self):
        if self.position_ids is None and self.mask is not None and families.counts_tokens(self.decoder):
            self.position_ids = (self.mask.long().cumsum(1) - 1).clamp_min(0)[:, self.columns :]
        elif self.position_ids is None:
            self.position_ids = torch.arange(self.columns, self.columns + self.tokens, device=self.device)[None]
        return self.position_ids

    def positions(self):
        """[B, N] of the new tokens."""
        if self._given_positions().ndim == 3:  # on several axes, which pictures need: never smaller than before
            axes = self.position_ids[-families.axes(self.decoder) :] if families.axes(self.decoder) else None
            if axes is None:
                raise ValueError("position_ids must be [batch, tokens]")
            padding = torch.arange(self.tokens, device=self.device) < self.first[:, None]
            return axes.amax(0).masked_fill(padding, 0).cummax(1).values
        if self.position_ids.ndim != 2:
            raise ValueError("position_ids must be [batch, tokens]")
        return self.position_ids.expand(self.batch, -1)

    def position_ids_of(self, start, end, positions):
        """The decoder's position_ids for columns start..end-1 and the rows along behind them, at positions [B, S]."""
        if self.position_ids.ndim != 3:
            return positions
        own = self.position_ids[..., start:end].expand(-1, self.batch, -1)
        along = positions[:, end - start :].expand(len(own), -1, -1)
        return torch.cat([own, along], -1)

    def tokens_at(self, columns):
        """Ids or embeddings at columns [B, p]."""
        row = torch.arange(self.batch, device=self.device)[:, None]
        return (self.ids if self.embeds is None else self.embeds)[row, columns]

    def embedded(self, ids):
        """Ids [B, p] in the form that the call has its own tokens in."""
        return ids if self.embeds is None else self.decoder.get_input_embeddings()(ids)

    def inputs(self, start, end, along=None) -> dict:
        """The decoder's arguments for columns start..end-1 and, behind them, the rows `along`."""
        ids, embeds = (None if t is None else t[:, start:end] for t in (self.ids, self.embeds))
        rows = 0 if along is None else along.tokens.shape[1]
        if rows and embeds is None and along.tokens.is_floating_point():
            ids, embeds = None, self.decoder.get_input_embeddings()(ids)
        if rows:
            ids, embeds = (None if t is None else torch.cat([t, along.tokens], 1) for t in (ids, embeds))
        inputs = dict(input_ids=ids) if embeds is None else dict(inputs_embeds=embeds)
        if isinstance(self.kwargs.get("logits_to_keep"), int):  # of these rows; 0: all
            inputs["logits_to_keep"] = self.wanted and self.wanted + rows
        return self.kwargs | inputs | self._of_tokens(start, end, along) | self._pictures(start, end, along) | dict(
            attention_mask=self.mask_for(end, rows), past_key_values=self.cache, use_cache=True, return_dict=True
        )  # fmt: skip

    def _of_tokens(self, start, end, along) -> dict:
        """What Gemma 3n and 4 give every layer of each token besides: [B, N, layers, width]."""
        value = self.kwargs.get(PER_LAYER)
        if value is None:
            return {}
        parts = [value[:, start:end]]
        if along is not None:
            if along.columns is None:
                raise ValueError(
                    f"rows that are no tokens of the prompt have no {PER_LAYER}: choose a policy whose rows are, like "
                    "take or snapkv, or call the text model with input_ids"
                )
            row = torch.arange(self.batch, device=value.device)[:, None]
            parts.append(value[row, along.columns.to(value.device)])
        return {PER_LAYER: torch.cat(parts, 1)}

    def _pictures(self, start, end, along) -> dict:
        """What Qwen3-VL adds to the hidden states of pictures' tokens behind its first layers: visual_pos_masks [B, N]
        of those tokens, and a tensor per layer with a row for each of them."""
        mask = self.kwargs.get("visual_pos_masks")
        if mask is None:
            return {}
        row_of = mask.flatten().cumsum(0).view(mask.shape) - 1
        columns = torch.arange(start, end, device=mask.device).expand(self.batch, -1)
        if along is not None and along.columns is not None:
            columns = torch.cat([columns, along.columns], 1)
        mask, row_of = mask.gather(1, columns), row_of.gather(1, columns)
        embeds = [each[row_of[mask]] for each in self.kwargs["deepstack_visual_embeds"]]
        if along is not None and along.columns is None:
            mask = torch.cat([mask, torch.zeros_like(along.tokens[:, :, 0], dtype=torch.bool)], 1)
        return dict(visual_pos_masks=mask, deepstack_visual_embeds=embeds)

    def mask_for(self, end, along=0):
        """What Transformers builds its masks from, of the columns up to `end` and `along` rows more. Our layers read no
        mask; where all layers are ours, a ready-made 4D mask keeps it from building one."""
        if self.patch.all_own:
            return torch.empty(1, 1, 1, 1, device=self.device)
        if self.mask is None:
            return None
        mask = self.mask[:, : self.columns + end]
        for start, stop in self.layers[0].packed:  # as it was read
            mask = torch.cat([mask[:, :start], mask[:, start:stop].sort(1).values, mask[:, stop:]], 1)
        return torch.cat([mask, mask.new_ones(self.batch, along)], 1) if along else mask


def _padding(mask):
    """[B] int32 number of zeros of a 2D mask, the same on the host, and whether some come behind a one."""
    mask = mask.bool()
    zeros = (~mask).sum(1)
    *padding, holes = torch.cat([zeros, (mask.int().diff(dim=1) < 0).any()[None]]).tolist()
    return zeros.to(torch.int32), np.array(padding), bool(holes)


def _take(x, columns, dim):
    """x with its columns in another order [B, N]; they are its dimension `dim`, its rows the one before."""
    rest = x.ndim - 1 if dim == -1 else 1
    index = columns.to(x.device)
    index = index.view(*(1,) * (rest - 1), *index.shape, *(1,) * (x.ndim - rest - 1))
    return x.gather(rest, index.expand(*x.shape[:rest], columns.shape[1], *x.shape[rest + 1 :]))
