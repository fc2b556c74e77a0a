"""Reads of the same prompt share what no policy changes: `kvevict eval --share-reads` computes a layer once, and the
policies that follow only choose."""

import contextlib
from dataclasses import dataclass
from functools import partial

import torch

from ... import families
from ...context import current, within
from ..read import residual
from ..slots.adopt import SlidingLayer
from . import attention, forward

HOLD_TOKENS = (families.FULL_ATTENTION, families.SLIDING)


@dataclass
class Call:
    """One layer's call over a prompt's first tokens: what it got, what its attention got and gave, what it gave. As a
    context's `tap` it takes these in, and gives back what attention gave before."""

    hidden: torch.Tensor  # [B, T, E]
    positions: torch.Tensor  # [B, T]
    first: torch.Tensor  # [B]
    appended: int  # rows at the end that are not stored
    adapter: object  # of those
    given: tuple = ()  # arguments of the attention function, or of a sliding window's update
    options: dict | None = None
    out_lse: tuple | None = None  # what attention gave
    attention_input: torch.Tensor | None = None  # of the attention block, where the policy needed that
    after_attention: torch.Tensor | None = None  # the residual stream, where the policy measured that
    output: torch.Tensor | None = None

    def called(self, module, query, key, value, mask, options) -> None:
        """The attention function was called with these."""
        if not self.given:
            self.given, self.options = (module, query, key, value, mask), options

    def slid(self, keys, values) -> None:
        """A sliding window was updated with these."""
        self.given = keys, values

    def attended(self, attend) -> tuple:
        """What attend() gives, or gave."""
        if self.out_lse is None:
            self.out_lse = attend()
        return self.out_lse

    def same(self, other) -> bool:
        pairs = ((self.hidden, other.hidden), (self.positions, other.positions), (self.first, other.first))
        if self.appended != other.appended or self.adapter is not other.adapter:
            return False
        return all(a is b or (a.shape == b.shape and torch.equal(a, b)) for a, b in pairs)


class Replay:
    """Remembers the `most` calls that were last needed of each of a decoder's layers that hold tokens, with nothing
    stored.

    A call is replayed where its input is equal, bit for bit: the attention function gets the same queries, keys and
    values, so that the policy that is patched in sees and stores what it would have, and nothing is multiplied. A
    sliding window gets the same keys and values.
    """

    def __init__(self, decoder, most: int = 2):
        kinds = families.layer_kinds(decoder.config)
        # A layer whose slots others read is not done when it ends, and latents are not what attention gets.
        alone = not families.readers(decoder, kinds) and not families.is_latent(decoder.config)
        every = families.layers_of(decoder) if alone else ()
        self.layers = {index: layer for index, layer in enumerate(every) if kinds[index] in HOLD_TOKENS}
        self.most = most
        self.clear()

    def clear(self) -> None:
        self.known: dict = {index: [] for index in self.layers}

    @contextlib.contextmanager
    def during(self):
        """Inside, calls are remembered and replayed."""
        for index, layer in self.layers.items():
            forward.replace(layer, partial(self._forward, index))
        try:
            yield
        finally:
            for layer in self.layers.values():
                forward.restore(layer)

    def _forward(self, index, layer, own, hidden_states, **kwargs):
        step = current()
        if step is None or step.read is None or step.cache.layers[index].get_seq_length():
            return own(hidden_states, **kwargs)
        adapter = getattr(step.read.prepared, "adapter", None) if step.appended else None
        made = Call(hidden_states, step.positions, step.first, step.appended, adapter)
        slides = isinstance(step.cache.layers[index], SlidingLayer)
        measures = not slides and step.patch.after_attention and step.chooser.errors is not None
        hidden = not slides and step.patch.wants_hidden
        known = [call for call in self.known[index] if call.after_attention is not None or not measures]
        known = [call for call in known if call.attention_input is not None or not hidden]
        found = next((call for call in known if call.same(made)), made)
        with within(tap=found):
            if found is made:
                found.output = own(hidden_states, **kwargs)
            elif slides:
                step.cache.update(*found.given, index)
            else:
                module, query, key, value, mask = found.given
                if hidden:
                    step.hidden[index] = found.attention_input
                attention.attention(module, query, *step.cache.update(key, value, index), mask, **found.options)
                if measures:
                    residual.note(index, found.after_attention, "attention")
        if (slides or found.out_lse is not None) and isinstance(found.output, torch.Tensor):
            others = [call for call in self.known[index] if call is not found]
            self.known[index] = [*others, found][-self.most :]
        return found.output
