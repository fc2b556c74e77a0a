"""Choosers carry out the eviction of a call's slots. A call has one chooser, and it sees the layers in order. The
chooser for drafting is in draft.py."""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from ...ops import _ops
from ..measure import quantities
from ..memory import archive
from ..memory.carried import join, of_layer
from ..methods import propagate
from . import evict
from .layer import LayerCall
from .schedule import observes
from .step import Step


class Chooser:
    """Keeps all slots (assisted decoding's candidates may be taken back)."""

    errors: Any = None  # the kvevict.engine.methods.residual.Errors that the call measures
    onward: propagate.Onward | None = None  # tokens of the call that upper layers read
    held = 0  # number of waiting layers with new slots
    looks = True  # at slots, after a decoded token: they are to lie in one place

    def takes(self, call: LayerCall) -> bool:
        """True if `layer` is to be called after a decoded token. Else the layer keeps all slots."""
        return False

    def layer(self, call: LayerCall) -> None:
        """The end of one layer's attention."""
        of_tokens = call.step.plan.of_tokens is not None
        evict.store(call, carried=evict.numbers(call).carried if of_tokens else call.layer.carry)

    def end(self, spans: Any, step: Step, hidden: torch.Tensor) -> None:
        """The end of a span of `kvevict.engine.read.spans.Spans`. hidden: [B, 1, E] of its last row."""


class Pending(NamedTuple):
    """A layer that was read and may be cut."""

    call: LayerCall
    carried: torch.Tensor | None
    ranked: torch.Tensor | None  # None: another layer chooses


class Deciding(Chooser):
    """Carries out `kvevict.engine.read.decisions.Decisions`."""

    def __init__(self, decisions: Any, errors: Any = None) -> None:
        self.decisions, self.errors = decisions, errors
        self.pending: dict = {}  # layer's number -> Pending
        self.choices: dict = {}  # layer's number -> its evict.Choice; None: it kept everything

    @property
    def held(self) -> int:  # type: ignore[override]  # the base class has a constant
        return sum(each.call.columns > 0 for each in self.pending.values())

    def takes(self, call: LayerCall) -> bool:
        """Only layers that are due are scored. Every layer remembers the row, or adds up its attention."""
        step, layer, policy = call.step, call.layer, call.step.plan.policy
        order = step.plan.order[call.module.layer_idx]
        observing = observes(policy, order, len(step.plan.order))
        if policy.decode and observing and policy.rows.decoded and not policy.rows.newest:
            row = torch.cat([call.q, call.out.transpose(1, 2)], 3) if step.plan.wants_outputs else call.q
            layer.remember(row, policy.rows.decoded)
        slots = self._slots(call)
        if policy.carry == "sum" and observing and policy.score.adds_attention:
            sums: Any = join("sum", call.probs, layer.carry)
            if slots is None:
                layer.carry = of_layer(sums, layer)
                return False
            if call.index not in step.plan.last_reader and evict.drop(call, slots, sums):
                return False
        return slots is not None or (policy.carry == "sum" and observing)

    def _slots(self, call: LayerCall) -> np.ndarray | None:
        """Slots [B] that a decoded token leaves to a layer; None: all of them."""
        return self.decisions.kept(call.order, call.step.plan.ranks.counts(call.layer).sum(1))

    def recall(self, call: LayerCall) -> None:
        """Before `layer`, after a decoded token: in rows that lose slots, all tokens' slots take part."""
        layer, slots = call.layer, self._slots(call)
        if slots is not None and call.policy.recall and layer.archive is not None:
            archive.recall(layer, slots < call.step.plan.ranks.counts(layer).sum(1))
            call.probs, call.rows = None, replace(call.rows, out=None, lse=None)  # these are of fewer slots

    def layer(self, call: LayerCall) -> None:
        policy, order, chunk = call.policy, call.order, call.step.chunk
        observed = chunk is None or chunk.observed
        observing = observed and observes(policy, order, len(call.step.plan.order))
        if observing and not call.step.decoding:
            memory = call.step.read.memory
            memory[call.index] = call.step.rows.accumulate(call.rows, memory.get(call.index))
            call.layer.memory = quantities.remembered(call.step.plan.needed, call.rows, call.layer.memory)
        if self.decisions.asks:
            asked = policy.layers.preference(call.slots, *evict.measured(call, policy.layers.needs))
            self.decisions.ask(order, asked.cpu().numpy())
        decision = self.decisions.at(order, call.slots.alive)
        narrows = propagate.due(call)
        carries = observing and (policy.carry != "none" or (chunk is not None and chunk.again is not None))
        score: Any = None
        carried = None if observed else call.layer.carry
        if decision.scores or narrows or carries or self.errors is not None:
            carried, score = evict.numbers(call)
        if self.errors is not None:
            self.errors.note_scores(call, score)
        if narrows:
            self.onward = propagate.choose(call, score)
        for watcher in call.step.watchers:
            watcher.read(call, score)
        waits = all(cut.layer != order for cut in decision.cuts)
        self.pending[order] = Pending(
            call.waiting() if waits else call, carried, evict.ranked(call, score) if decision.scores else None
        )
        keep = self._pool(decision.cuts) if decision.pooled else {}
        for cut in decision.cuts:
            with self.pending[cut.layer].call.layer.storage.here():
                self._carry_out(cut, keep.get(cut.layer))

    def _pool(self, cuts: tuple) -> dict:
        """Number of slots [B, heads of all ranks] that each layer keeps, by one ranking of all layers' slots."""
        waiting = [self.pending[cut.layer] for cut in cuts]
        first = waiting[0].call
        policy, device = first.policy, first.slots.device
        slots = sum(np.minimum(cut.slots, each.call.slots.alive) for cut, each in zip(cuts, waiting, strict=True))
        with first.step.meter.clock("select"):
            layers = [each.call.slots.all_ranks(policy.shared) for each in waiting]
            scores = [
                each.call.slots.heads.gather(each.ranked, whole.columns)
                for each, whole in zip(waiting, layers, strict=True)
            ]
            keep = policy.layers.keep(layers, scores, _ops.upload(slots, device))
            keep = [evict.within(*each, self.decisions.bar) for each in zip(keep, layers, scores, strict=True)]
        return {cut.layer: each for cut, each in zip(cuts, keep, strict=True)}

    def _carry_out(self, cut: Any, keep: Any = None) -> None:
        """Store or cut a layer. After a cut that is not final it stays pending, with its survivors' `ranked` scores."""
        call, carried, ranked = self.pending.pop(cut.layer)
        if keep is not None:
            with call.step.meter.clock("select"):
                self.choices[cut.layer] = evict.take(call, ranked, keep.to(call.slots.device))
        elif cut.by == cut.layer:
            slots: Any = None if cut.slots is None else np.minimum(cut.slots, call.slots.alive)
            bar = self.decisions.bar
            cuts = slots is not None and (bar is not None or (slots < call.slots.alive).any())
            self.choices[cut.layer] = evict.choose(call, ranked, slots, cut.final, bar) if cuts else None
        choice = self.choices[cut.by]
        if choice is not None or call.columns or carried is not None or call.step.decoding:
            evict.store(call, choice, carried)
        if not cut.final:
            ranked = ranked if choice is None else evict.kept(ranked, choice.index)
            self.pending[cut.layer] = Pending(call.stored(), None, ranked)
