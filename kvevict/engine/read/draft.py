"""Drafting by the model itself (LAQ): a prompt is read with nothing evicted, a copy of its cache cut by SnapKV writes a
few tokens, and the rows of these tokens then observe."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ... import families
from ...compat import CACHE
from ...policy.policy import Policy
from ...policy.rows.drafted import head
from ...policy.rows.window import FirstWindow
from ..slots.adopt import StatefulLayer
from ..slots.cache import EvictionLayer, fit
from ..slots.latent import LatentLayer
from ..slots.meter import Meter
from . import evict
from .choosers import Chooser
from .layer import Attended, LayerCall, layer_call
from .step import SpanEnd, Step

FIRST_CUT = Policy(score="snapkv", rows=FirstWindow(), budget=2**30)


class _DraftLayer(EvictionLayer):
    """A copy of the slots in [stored | new] that `choice` keeps. It notes the rows that are decoded over them."""

    def __init__(self, sequence: Any, call: LayerCall, choice: Any, room: int) -> None:
        super().__init__(sequence)
        self.lazy_initialization(call.new[0])
        kept = choice.index, choice.keep, *call.new, call.slots.pos, call.slots.kv.first
        self.storage = call.layer.storage.gathered().moved(choice.keep + room, *kept)
        self.kinds = call.layer.kinds
        self.rows = []  # (q [B, H, 1, D], k, v [B, Hkv, 1, D]) of each row

    def decode(self, q: Any, k: Any, v: Any, pos: Any, module: Any = None, **options: Any) -> Any:
        self.rows.append((q, k, v))
        return super().decode(q, k, v, pos, module, **options)


class _StatefulDraftLayer(_DraftLayer, StatefulLayer):
    """A draft layer with a copy of the state too: states are updated in place."""

    def __init__(self, sequence: Any, call: LayerCall, choice: Any, room: int) -> None:
        super().__init__(sequence, call, choice, room)
        self.state = copy.deepcopy(call.layer.state)


class _LatentDraftLayer(_DraftLayer, LatentLayer):
    """A draft layer of latents; notes every head's keys and values of the rows."""

    def __init__(self, sequence: Any, call: LayerCall, choice: Any, room: int) -> None:
        super().__init__(sequence, call, choice, room)
        self.widths = call.layer.widths

    def decode(self, q: Any, k: Any, v: Any, pos: Any, module: Any = None, **options: Any) -> Any:  # type: ignore[override]
        whole = torch.cat([k, v], -1)[..., : sum(self.widths)]
        self.rows.append((q, *fit(*module.expand_kv(*whole.split(self.widths, -1)))))
        return LatentLayer.decode(self, q, k, v, pos, module, **options)


DRAFT_LAYERS = {EvictionLayer: _DraftLayer, StatefulLayer: _StatefulDraftLayer, LatentLayer: _LatentDraftLayer}


class _Watch(Chooser):
    """The chooser of a draft's step: only TADA's measurements of its rows are used."""

    def __init__(self, errors: Any) -> None:
        self.errors = errors


class Drafting(Chooser):
    """Layers wait until tokens were drafted; then `chooser` sees them in order."""

    def __init__(self, chooser: Any) -> None:
        self.chooser, self.errors, self.calls = chooser, chooser.errors, []

    held = property(lambda self: len(self.calls))

    def layer(self, call: LayerCall) -> None:
        """Wait, holding only the rows that observe the prompt."""
        self.calls.append(call.drafting(max(FIRST_CUT.rows.window, call.policy.rows.window)))

    def end(self, span_end: SpanEnd) -> None:
        calls, self.calls = self.calls, []
        caches = self._drafted(span_end, calls)
        while calls:
            call = calls.pop(0)
            rows, caches[call.slots.index] = caches[call.slots.index].rows, None
            drafted = tuple(torch.cat(part, 2) for part in zip(*rows, strict=True))
            with call.step.meter.clock("evict"):
                self.chooser.layer(replace(call, rows=replace(call.rows, drafted=drafted)))

    def _drafted(self, span_end: SpanEnd, calls: list) -> list:
        """The layers of an evicted copy of the cache, after tokens were drafted over it."""
        step, meter, n_d = span_end.step, span_end.step.meter, span_end.step.plan.policy.rows.n_d
        with meter.clock("draft"):
            quiet = copy.copy(step.plan)
            quiet.policy = replace(FIRST_CUT, keep_first=step.plan.policy.keep_first)
            quiet.wants_outputs = quiet.wants_probs = False
            copied = {families.STATE: copy.deepcopy}  # a state is updated in place
            each = zip(step.plan.kinds, step.cache.layers, strict=True)
            layers = [copied.get(kind, copy.copy)(layer) for kind, layer in each]
            cache = step.cache.with_layers(copy.copy(step.cache.sequence), layers)
            unseen = Meter()  # drafting leaves no trace in the report
            for call in calls:
                kind = DRAFT_LAYERS[type(call.layer)]
                cache.layers[call.slots.index] = kind(cache.sequence, call, _first_choice(call, quiet, unseen), n_d)
            self._write(span_end, cache, quiet, unseen, n_d)
            meter.live["draft"] = sum(cache.layers[call.slots.index].live_bytes() for call in calls)
            meter.watch(calls[0].new[0], calls[0].slots.kv.padding, len(calls))
            del meter.live["draft"]
        return cache.layers

    def _write(self, span_end: SpanEnd, cache: Any, quiet: Any, meter: Meter, n_d: int) -> None:
        """Draft greedily over `cache`, also past an end of sequence; its layers note their rows."""
        step, arguments, hidden = span_end.step, span_end.arguments, span_end.hidden
        logits, at, none = head(arguments.top), step.positions[:, -1:], torch.zeros_like(step.first)
        for number in range(1, n_d + 1):
            ids, at = logits(hidden).argmax(-1), at + 1
            final = int(at.max()) if families.rope_depends_on_length(step.decoder) else None
            mask = arguments.mask_for(step.chunk.end, number)  # over all tokens drafted so far
            one = Step(
                quiet, step.decoder, cache, meter, at, none, 0 * step.padding, _Watch(self.errors), final_position=final
            )
            hidden = one.through(
                span_end.run, input_ids=ids, attention_mask=mask, position_ids=at.long(), **{CACHE: cache},
                use_cache=True, return_dict=True,
            ).last_hidden_state  # fmt: skip


def _first_choice(call: LayerCall, quiet: Any, meter: Meter) -> Any:
    """Choose, by SnapKV, as many slots as the layer may keep, equally many in each head."""
    kv, rows = call.slots.kv, call.rows
    read = replace(call.step.read, rows=quiet.policy.rows)
    step = replace(call.step, plan=quiet, read=read, meter=meter, elsewhere={})
    of = step, call.layer, call.module, rows.q, kv.k, kv.v, call.new, kv.options, rows.out, rows.lse
    first = layer_call(Attended(*of))
    alive = first.slots.alive
    slots = np.minimum(call.step.read.budgets.targets[call.order], alive)
    slots = np.where(kv.padding < kv.k.shape[2], slots, alive)  # a row with only padding in this chunk keeps all
    return evict.choose(first, evict.ranked(first, evict.numbers(first).score), slots)
