"""Choosers carry out evictions: they pass a layer's values to the stages of `kvevict.engine.cut`, and store the slots
that survive. A step has one chooser, which gets the layers in order. methods/draft.py and answering.py have further
choosers."""

from typing import Any, NamedTuple

import numpy as np
import torch

from ...ops import _ops
from ...policy.inputs import as_needs
from ..cut import Choice, by_sums, chosen, cut, joined, of_layers, protected, ranked, scored, taken
from ..measure import quantities
from ..measure.inputs import given
from ..memory.carried import join, kept, of_layer
from ..methods import propagate
from ..methods.residual import Errors
from .decisions import Cut, Decisions
from .layer import LayerCall
from .schedule import observes
from .step import Step


class Chooser:
    """A chooser that keeps all slots, for instance those of assisted decoding's candidates, which may be removed again.
    It is also the base class of the choosers that evict."""

    errors: Errors | None = None  # the layers' errors in this step; None: they are not measured
    onward: propagate.Onward | None = None  # tokens of this step that layers after `tsp` read; None: all
    held = 0  # number of layers that wait for their cuts while their new slots are not stored yet
    measures = False  # whether `layer` measures the policy's quantities wherever slots carry scores
    looks = True  # whether the chooser reads slots after a decoded token; then a fork's slots must lie in one buffer

    def token(self, call: LayerCall) -> None:
        """Evict slots of a layer that has attended in the step of a decoded token, whose slot is stored already."""

    def layer(self, call: LayerCall) -> None:
        """Evict slots of a layer that has attended in a chunk, or let the layer wait for its cut. This base class
        stores all slots."""
        of_tokens = call.step.plan.of_tokens is not None
        store(call, carried=numbers(call)[0] if of_tokens else call.layer.carry)

    def end(self, step: Step, hidden: torch.Tensor) -> None:
        """End a step. hidden: [B, 1, E] hidden state of the step's last row after the last layer."""


class Pending(NamedTuple):
    """A layer that has attended and waits for its cut."""

    call: LayerCall
    carried: torch.Tensor | None  # [B, Hkv, C] scores that the alive slots carry after the cut; None: none
    ranks: Any  # [B, Hkv, C] values to rank slots by (`cut.ranked`); None: another layer chooses for this one


class Deciding(Chooser):
    """A chooser that carries out `Decisions`: which layers are cut after a layer was read, and to how many slots."""

    measures = True

    def __init__(self, decisions: Decisions, errors: Errors | None = None) -> None:
        self.decisions, self.errors = decisions, errors
        self.pending: dict[int, Pending] = {}  # the layer's number among those that evict -> the waiting layer
        self.choices: dict[int, Choice | None] = {}  # the same number -> the layer's choice; None: it kept all slots

    @property
    def held(self) -> int:  # type: ignore[override]  # the base class has a constant
        return sum(each.call.columns > 0 for each in self.pending.values())

    def token(self, call: LayerCall) -> None:
        """Cut a layer that exceeds its budget after a decoded token. If the policy needs this, the layer first
        remembers the token's query row, or adds the token's attention weights to its carried scores."""
        step, layer, policy = call.step, call.layer, call.step.plan.policy
        observing = observes(policy, step.plan.order[call.module.layer_idx], len(step.plan.order))
        if policy.decode and observing and policy.rows.decoded and not policy.rows.newest:
            row = torch.cat([call.q, call.out.transpose(1, 2)], 3) if step.plan.wants_outputs else call.q
            layer.remember(row, policy.rows.decoded)
        slots = self.slots(call)
        if policy.carry == "sum" and observing and policy.score.adds_attention:
            sums: Any = join("sum", call.probs, layer.carry)
            if slots is None:
                layer.carry = of_layer(sums, layer)
                return
            if drop(call, slots, sums):
                return
        if slots is not None or (policy.carry == "sum" and observing):
            with step.meter.clock("evict"):
                self.layer(call)

    def slots(self, call: LayerCall) -> np.ndarray | None:
        """Return the number of slots [B] that a layer keeps after a decoded token; None if it keeps all."""
        return self.decisions.kept(call.order, call.step.plan.ranks.counts(call.layer).sum(1))

    def layer(self, call: LayerCall) -> None:
        """Score the layer, and carry out the cuts that the `Decision` for it lists. If none of these cuts is of this
        layer, the layer waits."""
        policy, order, chunk = call.policy, call.order, call.step.chunk
        observed = chunk is None or chunk.observed
        observing = observed and observes(policy, order, len(call.step.plan.order))
        if observing and not call.step.decoding:
            memory = call.step.read.memory
            memory[call.index] = call.step.rows.accumulate(call.rows, memory.get(call.index))
            call.layer.memory = quantities.remembered(call.step.plan.needed, call.rows, call.layer.memory)
        if self.decisions.asks:
            asked = policy.layers.preference(call.slots, *measured(call, policy.layers.needs))
            self.decisions.ask(order, asked.cpu().numpy())
        decision = self.decisions.at(order, call.slots.alive)
        narrows = propagate.due(call)
        carries = observing and (policy.carry != "none" or (chunk is not None and chunk.again is not None))
        score: Any = None
        carried = None if observed else call.layer.carry
        if decision.scores or narrows or carries or self.errors is not None:
            carried, score = numbers(call)
        if self.errors is not None:
            self.errors.note_scores(call, score)
        if narrows:
            self.onward = propagate.choose(call, score)
        for watcher in call.step.watchers:
            watcher.read(call, score)
        waits = all(each.layer != order for each in decision.cuts)
        with call.step.meter.clock("score"):
            ranks = ranked(policy, call.slots, score, order) if decision.scores else None
        self.pending[order] = Pending(call.waiting() if waits else call, carried, ranks)
        keep = self._pool(decision.cuts) if decision.pooled else {}
        for each in decision.cuts:
            with self.pending[each.layer].call.layer.storage.here():
                self._carry_out(each, keep.get(each.layer))

    def _pool(self, cuts: tuple) -> dict[int, torch.Tensor]:
        """Return layer -> number of slots [B, heads of all ranks] that each head keeps, by one ranking of all layers'
        slots."""
        waiting = [self.pending[each.layer] for each in cuts]
        first, layers, ranks = waiting[0].call, [each.call.slots for each in waiting], [each.ranks for each in waiting]
        slots = sum(np.minimum(each.slots, one.alive) for each, one in zip(cuts, layers, strict=True))
        with first.step.meter.clock("select"):
            keep = of_layers(first.policy, layers, ranks, slots, self.decisions.bar)
        return {each.layer: one for each, one in zip(cuts, keep, strict=True)}

    def _carry_out(self, decided: Cut, keep: torch.Tensor | None = None) -> None:
        """Cut a pending layer; keep: number of slots of each head, if known already. The layer stays pending if a later
        layer cuts it again."""
        call, carried, ranks = self.pending.pop(decided.layer)
        if decided.by == decided.layer:
            self.choices[decided.layer] = self._chosen(call, ranks, decided, keep)
        choice = self.choices[decided.by]
        if choice is not None or call.columns or carried is not None or call.step.decoding:
            store(call, choice, carried)
        if not decided.final:
            ranks = ranks if choice is None else kept(ranks, choice.index)
            self.pending[decided.layer] = Pending(call.stored(), None, ranks)

    def _chosen(self, call: LayerCall, ranks: torch.Tensor, decided: Cut, keep: torch.Tensor | None) -> Choice | None:
        """Choose the slots that stay in a layer, by ranks of its own slots; None if all stay."""
        policy, slots, most, bar = call.policy, call.slots, decided.slots, self.decisions.bar
        with call.step.meter.clock("select"):
            if keep is not None:
                return taken(policy, slots, ranks, keep.to(slots.device), measured(call, policy.refine.picks_by))
            if most is None or (bar is None and (most >= slots.alive).all()):
                return None
            picks = measured(call, policy.refine.picks_by)
            return chosen(policy, slots, ranks, most, picks, order=decided.layer, bar=bar, final=decided.final)


def numbers(call: LayerCall) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return (the scores that the alive slots carry from now on, or None; the scores by which they are ranked), as
    `cut.joined` does."""
    policy, chunk = call.policy, call.step.chunk
    with call.step.meter.clock("score"):
        score = scored(policy, call.slots, measured(call, policy.score.needs), call.rows.q.shape[1])
        if chunk is not None and chunk.again is not None:
            parts, index = call.step.read.numbers, call.index  # layer -> largest score over the parts so far, or NaN
            score = parts[index] = torch.fmax(parts[index], score) if index in parts else score
            if not chunk.last:
                return call.layer.carry, score
            del parts[index]
        return joined(policy, call.slots, score, call.layer.carry, measured(call, policy.score.factors))


def measured(call: LayerCall, needs: tuple) -> list:
    """Measure the quantities that a part of the policy needs. A quantity that was measured for another part before is
    taken from `call.known`."""
    wanted = [quantities.quantity(each) for each in as_needs(needs) if each not in call.known]
    observation = call.observation if any(each.observes for each in wanted) else None
    return quantities.measured(needs, call.slots, observation, given(call, wanted), call.known)


def choose(call: LayerCall, slots: np.ndarray) -> Choice:
    """Choose the slots of a layer that stay, by all stages of a cut; for layers that share their choice with no other.
    slots: [B] number of slots to keep, over all kv heads."""
    carried, inputs = call.layer.carry, given(call, call.step.plan.needed)
    return cut(call.policy, call.slots, call.observation, slots, order=call.order, carried=carried, given=inputs)


def store(call: LayerCall, choice: Choice | None = None, carried: torch.Tensor | None = None) -> None:
    """Store the surviving slots in the layer, and the scores `carried` of all alive slots, as far as they survive.
    choice: the slots that survive; None: all do."""
    layer, slots, tiers = call.layer, call.slots, call.step.cache.tiers
    if not call.step.decoding:
        call.step.meter.weigh(call.index, tiers.every.get(call.index, layer.storage), *call.to_store)
    if choice is not None:
        for watcher in call.step.watchers:
            watcher.cut(call, choice)
    with call.step.meter.clock("compact"):
        if choice is not None:
            index = choice.index.to(slots.device)  # another layer, on another device, may have chosen
            layer.keep(index, choice.keep, *call.to_store, slots.pos, slots.kv.first)
            layer.prompt = slots.prompt  # unchanged, since no slot of the prompt was evicted
            slots.heads.ranks.note(layer, choice.all_ranks)
            carried = None if carried is None else kept(carried, index, torch.nan)
        elif call.columns:
            layer.append(*call.to_store, slots.pos, slots.kv.first, call.padding)
        layer.carry = of_layer(carried, layer)
        if call.policy.recall and call.columns:
            read = call.step.read
            expected = 0 if read is None else np.array(read.seen)[:, None]
            new = *call.to_store, slots.pos, slots.kv.first, call.padding
            tiers.write(call.index, *new, expected)
    if not call.step.decoding:
        call.step.meter.live[call.index] = layer.live_bytes()


def drop(call: LayerCall, slots: np.ndarray, sums: torch.Tensor) -> bool:
    """Cut a layer after a decoded token to slots [B] by sums [B, Hkv, C] of attention weights: the same cut as
    `Deciding.layer` makes, but faster. Returns False, and changes nothing, if the policy does more than to drop the
    slots with each head's smallest sums."""
    step, layer, policy = call.step, call.layer, call.policy
    counts = layer.counts
    keep = by_sums(policy, counts, slots) if step.plan.ranks.size == 1 else None
    if keep is None:
        return False
    with step.meter.clock("evict"):
        first, last = protected(policy, step.rows, call.order, call.rows, counts.max(1))
        wanted = _ops.upload(keep, sums.device, torch.int32)
        index = _ops.select(sums.contiguous(), layer.len, wanted, first, last, int(keep.max()))
        layer.keep(index, keep)
        level = keep.min() == keep.max()  # all heads keep equally many slots, so no index is -1
        layer.carry = sums.gather(2, index.long()) if level else kept(sums, index, torch.nan)
    return True
