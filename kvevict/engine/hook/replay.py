"""Reads of the same prompt share the results that do not depend on the policy: `kvevict eval --share-reads` computes a
layer once, and later policies only choose slots."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ... import families
from ...context import current, within
from ..read import residual
from ..slots.adopt import SlidingLayer
from . import attention, forward

HOLD_TOKENS = (families.FULL_ATTENTION, families.SLIDING)


@dataclass
class Call:
    """One layer's call over a prompt's first tokens: inputs and output of the layer and of its attention. As a
    context's `tap` it records them, and returns attention's recorded output later."""

    hidden: torch.Tensor  # [B, T, E]
    positions: torch.Tensor  # [B, T]
    first: torch.Tensor  # [B]
    appended: int  # rows at the end that are not stored
    adapter: object  # of the appended rows
    unseen: torch.Tensor | None = None  # [B, 2] positions that the appended rows do not see
    given: tuple = ()  # arguments of the attention function, or of a sliding window's update
    options: dict | None = None
    out_lse: tuple | None = None  # attention's output
    attention_input: torch.Tensor | None = None  # of the attention block, if the policy needed it
    after_attention: torch.Tensor | None = None  # the residual stream, if the policy measured it
    output: torch.Tensor | None = None

    def called(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        options: dict[str, Any],
    ) -> None:
        """Record the arguments of the attention function."""
        if not self.given:
            self.given, self.options = (module, query, key, value, mask), options

    def slid(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Record a sliding window's update."""
        self.given = keys, values

    def attended(self, attend: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
        """The result of attend(), recorded or new."""
        if self.out_lse is None:
            self.out_lse = attend()
        return self.out_lse

    def same(self, other: "Call") -> bool:
        if self.appended != other.appended or self.adapter is not other.adapter:
            return False
        pairs: Any = zip(self._inputs(), other._inputs(), strict=True)
        return all(
            a is b or (a is not None and b is not None and a.shape == b.shape and torch.equal(a, b)) for a, b in pairs
        )

    def _inputs(self) -> tuple:
        return self.hidden, self.positions, self.first, self.unseen


class Replay:
    """Remembers, for each decoder layer that holds tokens, the `most` calls used last, of those with nothing stored.

    A call is replayed if its input is equal bit for bit. The attention function then gets the same queries, keys and
    values without a matrix multiplication, so the patched policy sees and stores the same tensors. A sliding window
    gets the same keys and values.
    """

    def __init__(self, decoder, most: int = 2):
        kinds = families.layer_kinds(decoder.config)
        # Not replayed: models with layers that read another layer's slots (it is unfinished when it ends), and models
        # with latents (attention gets other tensors).
        alone = not families.readers(decoder, kinds) and not families.is_latent(decoder.config)
        every = families.layers_of(decoder) if alone else ()
        self.layers = {index: layer for index, layer in enumerate(every) if kinds[index] in HOLD_TOKENS}
        self.most = most
        self.clear()

    def clear(self) -> None:
        self.known: dict = {index: [] for index in self.layers}

    @contextlib.contextmanager
    def during(self) -> Iterator[None]:
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
        made = Call(hidden_states, step.positions, step.first, step.appended, adapter, step.unseen)
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
